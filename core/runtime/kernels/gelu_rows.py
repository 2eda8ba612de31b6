"""Rows of a float8 product made of activations: GELU, and other inputs to its left.

Owns the operation: tensors that the product's input would be joined from are read once, and only
its float8 values are written.

Shapes: T rows, F features before GELU, N other inputs, I = N + F.
"""

from __future__ import annotations

import torch
from torch.nn.functional import gelu

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantize_gelu_rows(
    x_TF: torch.Tensor, left_TN: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `left_TN` and then GELU (the tanh kind) of `x_TF`, `[T, I]`, and scales `[T, 1]`.

    A row with a value that is not finite gets the scale NaN.
    """
    if x_TF.is_cuda:
        from triptych.core.runtime.kernels.triton.gelu_rows import quantize_gelu_rows as on_gpu

        quantized_TI, scale_T1 = on_gpu(x_TF, left_TN)
        return quantized_TI, scale_T1
    rows_TI = gelu(x_TF.float(), approximate="tanh")
    if left_TN is not None:
        rows_TI = torch.cat([left_TN.float(), rows_TI], dim=1)
    largest_T1 = rows_TI.abs().amax(dim=1, keepdim=True)
    scale_T1 = torch.where(largest_T1 == 0, 1.0, largest_T1 / _LARGEST)
    scale_T1 = torch.where(largest_T1.isfinite(), scale_T1, torch.nan)
    return (rows_TI / scale_T1).to(torch.float8_e4m3fn), scale_T1
