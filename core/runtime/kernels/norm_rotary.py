"""Norm and rotation of queries or keys, as image transformers have them.

Owns the operation: a root-mean-square norm of each head with its weights (Zhang and Sennrich 2019,
arXiv:1910.07467), then a rotation of adjacent pairs (Su et al. 2021, arXiv:2104.09864), written
into a part of a larger tensor.

Shapes: R rows, T tokens of a row, H heads, D head dim.
"""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm


def norm_rotary(
    x_RTHD: torch.Tensor,
    weight_D: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    out_RTHD: torch.Tensor,
    *,
    eps: float,
) -> None:
    """Write the rotated norm of `x_RTHD` to `out_RTHD`, which may lie in a larger tensor.

    `cos_TD` and `sin_TD`, in float32, hold each pair's value twice, without signs.
    """
    if x_RTHD.is_cuda:
        from triptych.core.runtime.kernels.triton.norm_rotary import norm_rotary as on_gpu

        on_gpu(x_RTHD, weight_D, cos_TD, sin_TD, out_RTHD, eps)
        return
    normed_RTHD = rms_norm(x_RTHD, x_RTHD.shape[3:], weight_D, eps).float()
    even, odd = normed_RTHD.unflatten(3, (-1, 2)).unbind(4)
    turned_RTHD = torch.stack((-odd, even), 4).flatten(3)
    out_RTHD.copy_(normed_RTHD * cos_TD[:, None] + turned_RTHD * sin_TD[:, None])
