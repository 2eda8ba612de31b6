"""The adaptive norms of diffusers' blocks as one operation each.

Owns their twins, which share every parameter and keep the names of what they hold. A twin is for
norms that scale and shift their own output; where a block does that itself, its forward would have
to be written again, and it is left alone.
"""

from __future__ import annotations

from typing import Any

from diffusers.models import normalization as of_diffusers
from torch import Tensor, nn

from triptych.core.runtime.kernels.adaln import modulated_norm

_SHIFT_FIRST = (of_diffusers.AdaLayerNormZero, of_diffusers.AdaLayerNormZeroSingle)


def fuse_norms(module: nn.Module) -> int:
    """Put twins in the places of a model's adaptive layer norms; how many there were."""
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if _has_twin(child)
    ]
    for parent, name, child in found:
        is_zero = type(child) in _SHIFT_FIRST
        setattr(parent, name, _Zero(child) if is_zero else _Continuous(child))
    return len(found)


def _has_twin(module: Any) -> bool:
    if type(module) not in (*_SHIFT_FIRST, of_diffusers.AdaLayerNormContinuous):
        return False
    return isinstance(module.norm, nn.LayerNorm) and module.norm.weight is None


class _Zero(nn.Module):
    """Gives the norm of its input and what the conditioning has left: gates, the MLP's part."""

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
    """The norm before a model's projection to latents."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.silu, self.linear, self.norm = norm.silu, norm.linear, norm.norm

    def forward(self, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        scale, shift = self.linear(self.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1)
        return modulated_norm(x, scale, shift, eps=self.norm.eps)
