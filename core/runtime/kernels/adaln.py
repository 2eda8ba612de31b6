"""Adaptive normalization of diffusion transformers (Peebles and Xie 2023, arXiv:2212.09748).

Owns the operations: a norm without weights that is scaled and shifted by the row's conditioning,
and the gated residual before it.

Shapes: R rows, T tokens of a row, C features.
"""

from __future__ import annotations

import torch
from torch.nn.functional import layer_norm, rms_norm


def modulated_norm(
    x_RTC: torch.Tensor,
    scale_RC: torch.Tensor,
    shift_RC: torch.Tensor,
    *,
    eps: float,
    is_rms: bool = False,
) -> torch.Tensor:
    """`norm(x) * (1 + scale) + shift`; the norm is a layer norm, or root-mean-square."""
    if x_RTC.is_cuda:
        from triptych.core.runtime.kernels.triton import adaln as on_gpu

        normed: torch.Tensor = on_gpu.modulated_norm(x_RTC, scale_RC, shift_RC, eps, is_rms)
        return normed
    features = x_RTC.shape[-1:]
    norm = rms_norm if is_rms else layer_norm
    normed_RTC = norm(x_RTC, features, eps=eps)
    return normed_RTC * (1 + scale_RC[:, None]) + shift_RC[:, None]


def gated_modulated_norm(
    x_RTC: torch.Tensor,
    residual: tuple[torch.Tensor, torch.Tensor],
    scale_RC: torch.Tensor,
    shift_RC: torch.Tensor,
    *,
    eps: float,
    is_rms: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The modulated norm of `x + gate * y`, and that sum. `residual` is y `[R, T, C]` and gate."""
    y_RTC, gate_RC = residual
    if x_RTC.is_cuda:
        from triptych.core.runtime.kernels.triton import adaln as on_gpu

        normed_RTC, total_RTC = on_gpu.gated_modulated_norm(
            x_RTC, y_RTC, gate_RC, scale_RC, shift_RC, eps, is_rms
        )
        return normed_RTC, total_RTC
    total_RTC = x_RTC + gate_RC[:, None] * y_RTC
    return modulated_norm(total_RTC, scale_RC, shift_RC, eps=eps, is_rms=is_rms), total_RTC
