"""Normalization: root mean square (Zhang and Sennrich 2019, arXiv:1910.07467), and layer norm.

Shapes: the last axis, C, is normalized; what comes before it is free.
"""

from __future__ import annotations

import torch
from torch.nn.functional import layer_norm as torch_layer_norm
from torch.nn.functional import rms_norm as torch_rms_norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize the last axis in float32, cast to the type of `weight`, and scale by it.

    `weight` broadcasts against `x` from the right, so each head may have its own. Returns a tensor
    in the type of `x`.
    """
    assert x.shape[-1] == weight.shape[-1]
    if x.is_cuda and weight.dim() == 1:
        from triptych.core.runtime.kernels.triton import add_rms_norm as on_gpu

        normed: torch.Tensor = on_gpu.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps)
        return normed.view(x.shape)
    return _reference(x.to(weight.dtype), weight, eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight_C: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum, normalized as above, and the sum itself."""
    assert x.shape == residual.shape
    if x.is_cuda:
        from triptych.core.runtime.kernels.triton import add_rms_norm as on_gpu

        normed, total = on_gpu.add_rms_norm(x, residual, weight_C, eps)
        return normed, total
    total = x + residual
    return rms_norm(total, weight_C, eps), total


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias_C: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Layer norm of the last axis in float32 (Ba et al. 2016, arXiv:1607.06450).

    `weight` broadcasts as that of `rms_norm`. Returns a tensor in the type of `x`.
    """
    normed = torch_layer_norm(x.float(), x.shape[-1:], None, None, eps).mul_(weight)
    return (normed if bias_C is None else normed.add_(bias_C)).to(x.dtype)


def _reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if weight.dim() == 1:
        return torch_rms_norm(x, weight.shape, weight, eps)
    return torch_rms_norm(x, weight.shape[-1:], None, eps).mul_(weight)
