"""Normalization layers. Own their weights; the operations are `core.runtime.kernels.rms_norm`'s.

Shapes: T tokens, C features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from triptych.core.runtime.kernels.rms_norm import add_rms_norm, layer_norm, rms_norm

NormKind = Literal["rms", "layer"]


class Norm:
    """No norm at all: the input is returned. Kinds of norms extend it."""

    __slots__ = ("bias_C", "eps", "is_centred", "weight_C")

    def __init__(self) -> None:
        self.weight_C: torch.Tensor | None = None
        self.bias_C: torch.Tensor | None = None
        self.is_centred, self.eps = False, 0.0

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The tensors to be filled, by their last name in a checkpoint."""
        named = {"weight": self.weight_C, "bias": self.bias_C}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def prepare(self) -> None:
        """Bring the loaded weights into the form the step uses; call once."""
        if self.is_centred and self.weight_C is not None:
            self.weight_C += 1

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Normalize every token."""
        return x_TC

    def of_sum(
        self, x_TC: torch.Tensor, pending_TC: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the pending output, if any; returns the normalized sum, and the sum."""
        total_TC = x_TC if pending_TC is None else x_TC + pending_TC
        return self(total_TC), total_TC


class RMSNorm(Norm):
    """Root-mean-square norm over the last axis, scaled by `weight_C`.

    Some families store weights less one (`is_centred`): those are kept and used in float32.
    """

    __slots__ = ()

    weight_C: torch.Tensor

    def __init__(
        self,
        num_features: int,
        *,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        is_centred: bool = False,
    ) -> None:
        super().__init__()
        self.is_centred = is_centred
        kept = torch.float32 if is_centred else dtype
        self.weight_C = torch.empty(num_features, dtype=kept, device=device)
        self.eps = eps

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


class LayerNorm(Norm):
    """Norm of mean 0 and variance 1 over the last axis, scaled by `weight_C`, shifted by `bias_C`.

    Weights may be centred as those of `RMSNorm`.
    """

    __slots__ = ()

    weight_C: torch.Tensor

    def __init__(
        self,
        num_features: int,
        *,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        is_centred: bool = False,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self.is_centred, self.eps = is_centred, eps
        kept = torch.float32 if is_centred else dtype
        self.weight_C = torch.empty(num_features, dtype=kept, device=device)
        if has_bias:
            self.bias_C = torch.empty_like(self.weight_C)

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Normalize every token."""
        return layer_norm(x_TC, self.weight_C, self.bias_C, self.eps)
