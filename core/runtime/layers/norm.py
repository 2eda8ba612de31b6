"""The normalization layer. Owns a weight; the operation is `core.runtime.kernels.rms_norm`."""

from __future__ import annotations

import torch

from triptych.core.runtime.kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm:
    """Root-mean-square norm over the last axis, scaled by `weight_C`.

    Some families store weights less one (`is_centred`): those are kept and used in float32.
    """

    __slots__ = ("eps", "is_centred", "weight_C")

    def __init__(
        self,
        num_features: int,
        *,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        is_centred: bool = False,
    ) -> None:
        self.is_centred = is_centred
        kept = torch.float32 if is_centred else dtype
        self.weight_C = torch.empty(num_features, dtype=kept, device=device)
        self.eps = eps

    def prepare(self) -> None:
        """Bring the loaded weight into the form the step uses; call once."""
        if self.is_centred:
            self.weight_C += 1

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Normalize every token."""
        return rms_norm(x_TC, self.weight_C, self.eps)

    def of_sum(
        self, x_TC: torch.Tensor, pending_TC: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the pending output, if any; returns the normalized sum, and the sum."""
        if pending_TC is None:
            return self(x_TC), x_TC
        return add_rms_norm(x_TC, pending_TC, self.weight_C, self.eps)
