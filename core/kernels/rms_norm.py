"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467).

Shapes: the last axis, C, is normalised; what comes before it is free.
"""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm as torch_rms_norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last axis in float32, cast back to the type of `x`, and scale by `weight`.

    `weight` broadcasts against `x` from the right, so heads may each bring their own.
    """
    assert x.shape[-1] == weight.shape[-1]
    assert x.dtype == weight.dtype
    return _reference(x, weight, eps)


def _reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if weight.dim() == 1:
        return torch_rms_norm(x, weight.shape, weight, eps)
    return torch_rms_norm(x, weight.shape[-1:], None, eps).mul_(weight)
