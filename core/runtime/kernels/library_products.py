"""The float8 product of torch's libraries in the place of ours, for batches of a prompt's size.

Owns the choice between both, and the call. Both sum in float32 and round once; in another order,
so the choice depends on the number of rows, and deterministic mode always uses our kernels.

Shapes: T rows, I inputs, O outputs, R groups of inputs.
"""

from __future__ import annotations

from functools import cache

import torch

from triptych.core.process.once import once
from triptych.core.runtime.kernels.triton.units import multiplies_float8

MIN_ROWS = 64
"""Rows from which a library's product in float8 is used.

An estimate: our kernel reaches a quarter of the rate of an H100's units, at which reading weights
takes as long as multiplying 50 to 75 rows.
"""
_BLOCK = 128
"""Inputs, and outputs, that share a scale of blocks."""
_ALIGNED = 16
"""Weights of a float8 product have a multiple of this number of inputs, and of outputs."""
_BLOCK_ALIGNED = 4 * _BLOCK
"""cuBLAS reads the scales of blocks in groups of four."""
_BLOCK_ROWS = 4
"""Rows whose scales cuBLAS reads at once."""
_FIRST_WITH_BLOCKS = (12, 9)
"""The version of CUDA in which cuBLAS multiplies with scales of blocks."""


def prefers_library(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype
) -> bool:
    """Whether `scaled_linear` is to be used: it can be, and there are rows enough."""
    return len(x_TI) >= MIN_ROWS and takes_scaled(weight_OI, scale, out_dtype)


def takes_scaled(weight_OI: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype) -> bool:
    """Whether torch's library has the product of a float8 weight, on the weight's device."""
    capability = cuda_capability(weight_OI.device)
    num_outputs, num_inputs = weight_OI.shape
    if capability is None or num_outputs % _ALIGNED or out_dtype is not torch.bfloat16:
        return False
    if scale.dim() == 2:
        has_blocks = capability == (9, 0) and _cuda_version() >= _FIRST_WITH_BLOCKS
        return has_blocks and num_inputs % _BLOCK_ALIGNED == 0
    return num_inputs % _ALIGNED == 0 and multiplies_float8("cuda", "".join(map(str, capability)))


def scaled_linear(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    scale: torch.Tensor,
    out_dtype: torch.dtype,
    bias_O: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `fp8_linear` of our kernels, of equally quantized rows: `x_TI @ (weight_OI * scale).T`.

    The weight must be one that `takes_scaled`. With scales of rows the product adds the bias.
    """
    from triptych.core.runtime.kernels.triton.fp8_linear import quantize_rows

    num_rows, num_inputs = x_TI.shape
    if scale.dim() < 2:
        quantized_TI, x_scale_1T = quantize_rows(x_TI, num_inputs)
        return scaled_product(quantized_TI, x_scale_1T.t(), weight_OI, scale, out_dtype, bias_O)
    quantized_TI, x_scale_RT = quantize_rows(x_TI, _BLOCK, _BLOCK_ROWS)
    y_TO = _multiply(quantized_TI, x_scale_RT.t(), weight_OI, scale, out_dtype, None)[:num_rows]
    return y_TO if bias_O is None else y_TO.add_(bias_O)


def scaled_product(
    quantized_TI: torch.Tensor,
    x_scale_T1: torch.Tensor,
    weight_OI: torch.Tensor,
    scale: torch.Tensor,
    out_dtype: torch.dtype,
    bias_O: torch.Tensor | None,
) -> torch.Tensor:
    """The product of rows that are quantized already; `scale` is one, or one for each output."""
    scale_O1 = scale.expand(len(weight_OI)).contiguous().unsqueeze(1)
    return _multiply(quantized_TI, x_scale_T1, weight_OI, scale_O1, out_dtype, bias_O)


def _multiply(
    quantized_TI: torch.Tensor,
    x_scale_TR: torch.Tensor,
    weight_OI: torch.Tensor,
    scale: torch.Tensor,
    out_dtype: torch.dtype,
    bias_O: torch.Tensor | None,
) -> torch.Tensor:
    return torch._scaled_mm(
        quantized_TI,
        weight_OI.t(),
        scale_a=x_scale_TR,
        scale_b=scale.t(),
        bias=bias_O,
        out_dtype=out_dtype,
        use_fast_accum=False,  # its sums have fewer bits than float32
    )


@cache
def cuda_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of NVIDIA's devices."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)


@once
def _cuda_version() -> tuple[int, ...]:
    return tuple(map(int, (torch.version.cuda or "0").split(".")))
