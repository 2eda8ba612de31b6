"""The normalisation layer. Owns a weight; the operation is `core.kernels.rms_norm`."""

from __future__ import annotations

import torch

from triptych.core.kernels.rms_norm import rms_norm


class RMSNorm:
    """Root-mean-square norm over the last axis, scaled by `weight_C`."""

    __slots__ = ("eps", "weight_C")

    def __init__(
        self, num_features: int, *, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight_C = torch.empty(num_features, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Normalise every token."""
        return rms_norm(x_TC, self.weight_C, self.eps)
