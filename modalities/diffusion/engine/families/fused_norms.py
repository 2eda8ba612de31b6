"""Adaptive norms of diffusers' blocks, each as one fused operation.

Owns their replacements, which share all parameters and keep attribute names. They replace norms
that scale and shift their own output; blocks that do so themselves are left unchanged, because
their forward would have to be rewritten.
"""

from __future__ import annotations

from typing import Any

from diffusers.models import normalization as of_diffusers
from torch import Tensor, nn

from triptych.core.runtime.kernels.adaln import modulated_norm

_SHIFT_FIRST = (of_diffusers.AdaLayerNormZero, of_diffusers.AdaLayerNormZeroSingle)


def fuse_norms(module: nn.Module) -> int:
    """Replace a model's adaptive layer norms by fused ones; returns how many there were."""
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if _is_fusible(child)
    ]
    for parent, name, child in found:
        is_zero = type(child) in _SHIFT_FIRST
        setattr(parent, name, _Zero(child) if is_zero else _Continuous(child))
    return len(found)


def _is_fusible(module: Any) -> bool:
    if type(module) not in (*_SHIFT_FIRST, of_diffusers.AdaLayerNormContinuous):
        return False
    return isinstance(module.norm, nn.LayerNorm) and module.norm.weight is None


class _Zero(nn.Module):
    """Returns the modulated norm, and the remaining parts of the conditioning, such as gates."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.emb = getattr(norm, "emb", None)
        self.silu, self.linear, self.norm = norm.silu, norm.linear, norm.norm
        self._num_parts = norm.linear.out_features // norm.norm.normalized_shape[0]

    def forward(
        self,
        x: Tensor,
        timestep: Tensor | None = None,
        class_labels: Tensor | None = None,
        hidden_dtype: Any = None,
        emb: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        if self.emb is not None:
            emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
        shift, scale, *rest = self.linear(self.silu(emb)).chunk(self._num_parts, dim=1)
        return modulated_norm(x, scale, shift, eps=self.norm.eps), *rest


class _Continuous(nn.Module):
    """The modulated norm before a model's projection to latents."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.silu, self.linear, self.norm = norm.silu, norm.linear, norm.norm

    def forward(self, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        scale, shift = self.linear(self.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1)
        return modulated_norm(x, scale, shift, eps=self.norm.eps)
