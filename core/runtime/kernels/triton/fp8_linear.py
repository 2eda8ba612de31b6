"""Linear projection in float8 (e4m3): weights as stored, rows of `x` quantized on the fly.

Owns the product, the quantization of rows and the torch reference of both. Each row has a scale
that maps its largest value to e4m3's. With block scales each 128 inputs of a row have one, as such
weights were trained for (DeepSeek-V3, arXiv:2412.19437). On a device without float8 units the rows
stay as they are, and only the weights have eight bits.

Shapes: T rows, I inputs, O outputs, R groups of a row's inputs (one or `I / 128`), P parts, M rows,
N outputs and K inputs of a tile's step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.float8 import as_stored, dequantized, to_stored
from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.tiling import (
    NUM_STAGES,
    VARYING,
    Tiling,
    are_on_one_device,
    ceil_div,
    choose_tiling,
    dot,
    load_rows,
    multiply,
    product_variant,
    steps_of_split,
    store_tile,
    tile_of_program,
)
from triptych.core.runtime.kernels.triton.units import multiplies_float8
from triptych.core.runtime.kernels.triton.variant import Variant

BLOCK = 128
"""Inputs, and outputs, that share a scale; and the inputs of a step with units for float8."""
_WIDE_STEP_INPUTS = 64
"""Inputs of a step without such units, where rows are wider."""
_BLOCK = tl.constexpr(BLOCK)
_LARGEST = tl.constexpr(448.0)
_ROW_BLOCK = 1024


def launch_fp8_linear(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    scale: torch.Tensor,
    out_dtype: torch.dtype,
    deterministic: bool = False,
) -> torch.Tensor:
    """Compute `x_TI @ (weight_OI * scale).T`, summed in float32.

    The weights are float8_e4m3fn. `scale` is float32: `[1]` for all, `[O]`, or one for each block
    of 128 by 128, `[ceil(O / 128), ceil(I / 128)]`.
    """
    return multiply_fp8(
        x_TI, weight_OI, scale, out_dtype, deterministic, has_units=has_float8_units(x_TI.device)
    )


fp8_linear = define_operator("fp8_linear", launch_fp8_linear)


@fake_of(fp8_linear)
def _(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    scale: torch.Tensor,
    out_dtype: torch.dtype,
    deterministic: bool = False,
) -> torch.Tensor:
    _check(x_TI, weight_OI, scale)
    return x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0], dtype=out_dtype)


@cache
def has_float8_units(device: torch.device) -> bool:
    """Whether the device multiplies float8. The interpreter does."""
    if device.type != "cuda":
        return True
    if torch.version.hip:
        return multiplies_float8("hip", torch.cuda.get_device_properties(device).gcnArchName)
    major, minor = torch.cuda.get_device_capability(device)
    return multiplies_float8("cuda", f"{major}{minor}")


def _check(x_TI: torch.Tensor, weight_OI: torch.Tensor, scale: torch.Tensor) -> None:
    num_outputs, num_inputs = weight_OI.shape
    assert are_on_one_device(x_TI, weight_OI, scale)
    assert x_TI.shape[1] == num_inputs
    assert x_TI.stride(1) == weight_OI.stride(1) == 1
    assert weight_OI.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float32
    assert scale.is_contiguous()
    if scale.dim() == 2:
        assert scale.shape == (ceil_div(num_outputs, BLOCK), ceil_div(num_inputs, BLOCK))
    else:
        assert scale.shape in {(1,), (num_outputs,)}


def multiply_fp8(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    scale: torch.Tensor,
    out_dtype: torch.dtype,
    deterministic: bool,
    *,
    has_units: bool,
) -> torch.Tensor:
    """As `launch_fp8_linear`, for a device with or without units for float8."""
    _check(x_TI, weight_OI, scale)
    (num_rows, num_inputs), num_outputs = x_TI.shape, len(weight_OI)
    has_blocks = scale.dim() == 2
    x_scale_RT = scale
    if has_units:
        x_TI, x_scale_RT = launch_quantize_rows(x_TI, BLOCK if has_blocks else num_inputs)
    tiling = choose_tiling(
        num_rows, num_outputs, ceil_div(num_inputs, BLOCK), is_deterministic=deterministic
    )
    sizes = num_outputs, num_inputs, x_TI.stride(0), weight_OI.stride(0)
    return multiply(
        _fp8_kernel,
        as_stored(x_TI),
        (x_scale_RT, as_stored(weight_OI), scale),
        sizes,
        tiling,
        out_dtype,
        HAS_UNITS=has_units,
        HAS_BLOCKS=has_blocks,
        IS_PER_OUTPUT=scale.numel() > 1,
        K=float8_step_inputs(has_units),
    )


def float8_step_inputs(has_units: bool) -> int:
    """The inputs of a step of `fp8_sum`."""
    return BLOCK if has_units else _WIDE_STEP_INPUTS


def launch_quantize_rows(
    x_TI: torch.Tensor, group_size: int, row_multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each group of a row in float8, and its factors, `[R, T]` in float32.

    Both have the next multiple of `row_multiple` rows; those added are not written.
    """
    num_rows, num_inputs = x_TI.shape
    quantized_TI, scale_RT = _quantized_like(x_TI, group_size, row_multiple)
    _quantize_kernel[num_rows, len(scale_RT)](
        x_TI,
        as_stored(quantized_TI),
        scale_RT,
        len(quantized_TI),
        num_inputs,
        group_size,
        x_TI.stride(0),
        B=min(_ROW_BLOCK, triton.next_power_of_2(group_size)),
        num_stages=NUM_STAGES,
    )
    return quantized_TI, scale_RT


quantize_rows = define_operator("quantize_rows", launch_quantize_rows)


def _quantized_like(
    x_TI: torch.Tensor, group_size: int, row_multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the results of `quantize_rows`."""
    num_rows, num_inputs = x_TI.shape
    num_rows = ceil_div(num_rows, row_multiple) * row_multiple
    num_groups = ceil_div(num_inputs, group_size)
    return (
        x_TI.new_empty(num_rows, num_inputs, dtype=torch.float8_e4m3fn),
        x_TI.new_empty(num_groups, num_rows, dtype=torch.float32),
    )


fake_of(quantize_rows)(_quantized_like)


def reference(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    scale: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    has_units: bool = True,
) -> torch.Tensor:
    """The product in float32, rounded once."""
    num_inputs, has_blocks = x_TI.shape[1], scale.dim() == 2
    x = x_TI.float()
    if has_units:
        x = round_rows(x, BLOCK if has_blocks else num_inputs)
    if has_blocks:
        scale = scale.repeat_interleave(BLOCK, 0)[: len(weight_OI)]
        scale = scale.repeat_interleave(BLOCK, 1)[:, :num_inputs]
    else:
        scale = scale.unsqueeze(1)
    return (x @ (weight_OI.float() * scale).t()).to(out_dtype)


def round_rows(x_TI: torch.Tensor, group_size: int) -> torch.Tensor:
    """Round float32 rows as quantization in groups does."""
    groups = x_TI.split(group_size, dim=1)
    return torch.cat([_round_group(group) for group in groups], dim=1)


def _round_group(x: torch.Tensor) -> torch.Tensor:
    largest = x.abs().amax(dim=1, keepdim=True)
    scale = torch.where(largest == 0, 1, largest / _LARGEST.value)
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@triton.jit(do_not_specialize=VARYING)
def _quantize_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    num_rows,
    num_inputs,
    group_size,
    x_stride,
    B: tl.constexpr,
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = group * group_size, tl.minimum((group + 1) * group_size, num_inputs)
    largest, sum_of_zeros = 0.0, 0.0
    for first in range(begin, end, B):
        inputs = first + tl.arange(0, B)
        x = tl.load(x_ptr + row * x_stride + inputs, mask=inputs < end, other=0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 0))
        sum_of_zeros += tl.sum(x * 0.0, 0)  # NaN if a value is not finite: a maximum may ignore it
    scale = tl.where(largest == 0, 1.0, largest / _LARGEST) + sum_of_zeros
    tl.store(scale_ptr + group.to(tl.int64) * num_rows + row, scale)
    for first in range(begin, end, B):
        inputs = first + tl.arange(0, B)
        x = tl.load(x_ptr + row * x_stride + inputs, mask=inputs < end, other=0).to(tl.float32)
        quantized = to_stored(x / scale, out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * num_inputs + inputs, quantized, mask=inputs < end)


@triton.jit(do_not_specialize=VARYING)
def _fp8_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    weight_stride,
    num_splits,
    HAS_UNITS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    IS_PER_OUTPUT: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    _, rows_M, outputs_N, is_row_M, is_output_N = tile_of_program(num_rows, num_outputs, M, N)
    x_ptrs_M = x_ptr + rows_M.to(tl.int64) * x_stride
    weight_ptrs_N = weight_ptr + outputs_N.to(tl.int64) * weight_stride
    if HAS_BLOCKS:
        scale_ptrs_N = scale_ptr + (outputs_N // _BLOCK) * tl.cdiv(num_inputs, _BLOCK)
    else:
        scale_ptrs_N = scale_ptr + outputs_N * IS_PER_OUTPUT
    total_MN = tl.zeros((M, N), tl.float32)
    for index in range(SPLITS):
        total_MN += fp8_sum(
            x_ptrs_M,
            is_row_M,
            x_scale_ptr + rows_M,
            num_rows,
            weight_ptrs_N,
            is_output_N,
            scale_ptrs_N,
            num_inputs,
            index,
            num_splits,
            HAS_UNITS,
            HAS_BLOCKS,
            SPLITS,
            K,
        )
    store_tile(out_ptr, total_MN, rows_M, outputs_N, num_rows, num_outputs)


@triton.jit
def fp8_sum(
    x_ptrs_M,
    is_row_M,
    x_scale_ptrs_M,
    num_scale_rows,
    weight_ptrs_N,
    is_output_N,
    scale_ptrs_N,
    num_inputs,
    index,
    num_splits,
    HAS_UNITS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    K: tl.constexpr,
):
    """Sum the products of rows and weights, with their scales, over one split of their inputs.

    The scales of rows are `num_scale_rows` apart from block to block, those of weights 1.
    """
    if not HAS_BLOCKS:
        scale_N = tl.load(scale_ptrs_N, mask=is_output_N, other=0)
        if HAS_UNITS:
            x_scale_M = tl.load(x_scale_ptrs_M, mask=is_row_M, other=0)
    total_MN = tl.zeros((x_ptrs_M.shape[0], weight_ptrs_N.shape[0]), tl.float32)
    begin, end = steps_of_split(index, tl.cdiv(num_inputs, K), num_splits, SPLITS)
    for step in range(begin, end):
        inputs_K = step * K + tl.arange(0, K)
        x_MK = load_rows(x_ptrs_M, is_row_M, inputs_K, num_inputs)
        weight_NK = load_rows(weight_ptrs_N, is_output_N, inputs_K, num_inputs)
        if HAS_UNITS:
            x_MK = x_MK.to(tl.float8e4nv, bitcast=True)
            weight_NK = weight_NK.to(tl.float8e4nv, bitcast=True)
        else:
            weight_NK = dequantized(weight_NK, x_MK.dtype)
        if HAS_BLOCKS:
            block = step * K // _BLOCK
            scale_N = tl.load(scale_ptrs_N + block, mask=is_output_N, other=0)
            if HAS_UNITS:
                x_scales_M = x_scale_ptrs_M + block.to(tl.int64) * num_scale_rows
                x_scale_M = tl.load(x_scales_M, mask=is_row_M, other=0)
        # One step at a time, since float8 units sum with fewer bits than float32 has.
        product_MN = dot(x_MK, weight_NK.T, tl.zeros_like(total_MN))
        if HAS_UNITS:
            product_MN *= x_scale_M[:, None]
        total_MN += product_MN * scale_N[None, :]
    return total_MN


def variants() -> tuple[Variant, ...]:
    """Scales of outputs and of blocks, weights only, and the quantization of rows."""
    rows = product_variant(
        "quantize",
        _quantize_kernel,
        {"x_ptr": "*bf16", "out_ptr": "*u8", "scale_ptr": "*fp32"},
        {"B": _ROW_BLOCK},
    )
    return (
        rows,
        _variant("outputs_16", Tiling(16, 64), has_blocks=False, has_units=True),
        _variant("blocks_128", Tiling(128, 128), has_blocks=True, has_units=True),
        _variant("weights_128", Tiling(128, 128), has_blocks=True, has_units=False),
    )


def _variant(name: str, tiling: Tiling, *, has_blocks: bool, has_units: bool) -> Variant:
    variant = product_variant(
        name,
        _fp8_kernel,
        {
            "x_ptr": "*u8" if has_units else "*bf16",
            "x_scale_ptr": "*fp32",
            "weight_ptr": "*u8",
            "scale_ptr": "*fp32",
            "out_ptr": "*bf16",
        },
        {
            "HAS_UNITS": has_units,
            "HAS_BLOCKS": has_blocks,
            "IS_PER_OUTPUT": True,
            **tiling.constants,
            "K": float8_step_inputs(has_units),
        },
        tiling.num_warps,
    )
    return replace(variant, multiplies_float8=has_units)
