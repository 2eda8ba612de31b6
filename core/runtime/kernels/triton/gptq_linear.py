"""Linear projection with weights of four bits in words: the layouts of GPTQ, AWQ and relatives.

Owns the layouts, the product and its reference. A word of 32 bits holds eight weights: along the
inputs in GPTQ's layout, along the outputs, permuted, in AWQ's. Groups of inputs share a scale and a
zero, `weight = (packed - zero) * scale`. Strides are free, so the transposed words of
compressed-tensors are a view of GPTQ's.

Shapes: T rows, I inputs, O outputs, R groups of inputs, P parts, M rows, N outputs and K inputs of
a tile's step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.int4_words import unpacked_words
from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.tiling import (
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
from triptych.core.runtime.kernels.triton.variant import Variant

_LAYOUTS = ("gptq", "gptq_v2", "awq")
MAX_STEP_INPUTS = 64
_NO_ZERO = 8


def launch_gptq_linear(
    x_TI: torch.Tensor,
    qweight: torch.Tensor,
    scales_RO: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of_input_I: torch.Tensor | None,
    layout: str,
    out_dtype: torch.dtype,
    deterministic: bool = False,
) -> torch.Tensor:
    """Compute `x_TI @ weight_OI.T`, summed in float32.

    `qweight` is int32, `[I / 8, O]` or, in the layout "awq", `[I, O / 8]`; `zeros` is `[R, O / 8]`,
    or `None` for 8. In the layout "gptq" zeros are stored less one. `group_of_input_I` is GPTQ's
    `g_idx`, for groups of inputs that are not consecutive.
    """
    (num_rows, num_inputs), (num_groups, num_outputs) = x_TI.shape, scales_RO.shape
    _check(x_TI, qweight, scales_RO, zeros, group_of_input_I, layout)
    group_size = ceil_div(num_inputs, num_groups)
    step_inputs = int4_step_inputs(group_size, num_groups)
    tiling = choose_tiling(
        num_rows, num_outputs, ceil_div(num_inputs, step_inputs), is_deterministic=deterministic
    )
    zero_strides = (0, 0) if zeros is None else zeros.stride()
    strides = x_TI.stride(0), *qweight.stride(), *scales_RO.stride(), *zero_strides
    return multiply(
        _gptq_kernel,
        x_TI,
        (qweight, scales_RO, zeros, group_of_input_I),
        (num_outputs, num_inputs, group_size, *strides),
        tiling,
        out_dtype,
        LAYOUT=layout,
        K=step_inputs,
    )


gptq_linear = define_operator("gptq_linear", launch_gptq_linear)


@fake_of(gptq_linear)
def _(
    x_TI: torch.Tensor,
    qweight: torch.Tensor,
    scales_RO: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of_input_I: torch.Tensor | None,
    layout: str,
    out_dtype: torch.dtype,
    deterministic: bool = False,
) -> torch.Tensor:
    _check(x_TI, qweight, scales_RO, zeros, group_of_input_I, layout)
    return x_TI.new_empty(x_TI.shape[0], scales_RO.shape[1], dtype=out_dtype)


def _check(
    x_TI: torch.Tensor,
    qweight: torch.Tensor,
    scales_RO: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of_input_I: torch.Tensor | None,
    layout: str,
) -> None:
    assert are_on_one_device(x_TI, qweight, scales_RO, zeros, group_of_input_I)
    num_inputs, (num_groups, num_outputs) = x_TI.shape[1], scales_RO.shape
    assert layout in _LAYOUTS
    assert x_TI.stride(1) == 1
    assert qweight.dtype == torch.int32
    if layout == "awq":
        assert qweight.shape == (num_inputs, num_outputs // 8)
    else:
        assert qweight.shape == (num_inputs // 8, num_outputs)
    if zeros is not None:
        assert zeros.shape == (num_groups, num_outputs // 8)
        assert zeros.dtype == torch.int32


def int4_step_inputs(group_size: int, num_groups: int) -> int:
    """The largest step that stays within a group."""
    if num_groups == 1:
        return MAX_STEP_INPUTS
    assert group_size % 32 == 0
    return MAX_STEP_INPUTS if group_size % MAX_STEP_INPUTS == 0 else 32


def reference(
    x_TI: torch.Tensor,
    qweight: torch.Tensor,
    scales_RO: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of_input_I: torch.Tensor | None,
    layout: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The product in float32 with weights of the type of `x_TI`, rounded once."""
    weight_IO = dequantize(qweight, scales_RO, zeros, group_of_input_I, layout)
    return (x_TI.float() @ weight_IO.to(x_TI.dtype).float()).to(out_dtype)


def dequantize(
    qweight: torch.Tensor,
    scales_RO: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of_input_I: torch.Tensor | None,
    layout: str,
) -> torch.Tensor:
    """Compute the weights `[I, O]` in float32."""
    is_awq = layout == "awq"
    packed_IO = (
        unpacked_words(qweight, layout) if is_awq else unpacked_words(qweight.t(), layout).t()
    )
    num_inputs, num_groups = len(packed_IO), len(scales_RO)
    if group_of_input_I is None:
        inputs_I = torch.arange(num_inputs, device=qweight.device)
        group_of_input_I = inputs_I // ceil_div(num_inputs, num_groups)
    zero_RO = torch.full_like(scales_RO, _NO_ZERO, dtype=torch.float32)
    if zeros is not None:
        zero_RO = unpacked_words(zeros, layout).float() + (layout == "gptq")
    groups = group_of_input_I.long()
    return (packed_IO.float() - zero_RO[groups]) * scales_RO.float()[groups]


@triton.jit(do_not_specialize=VARYING)
def _gptq_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, group_ptr, out_ptr,
    num_rows, num_outputs, num_inputs, group_size,
    x_stride, weight_stride, weight_output_stride, scale_stride, scale_output_stride,
    zero_stride, zero_output_stride, num_splits,
    LAYOUT: tl.constexpr, SPLITS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    first_output, rows_M, outputs_N, is_row_M, is_output_N = tile_of_program(
        num_rows, num_outputs, M, N
    )
    x_ptrs_M = x_ptr + rows_M.to(tl.int64) * x_stride
    total_MN = tl.zeros((M, N), tl.float32)
    for index in range(SPLITS):
        total_MN += gptq_sum(
            x_ptrs_M, is_row_M, weight_ptr, scale_ptr, zero_ptr, group_ptr,
            outputs_N, is_output_N, first_output, num_outputs, num_inputs, group_size,
            weight_stride, weight_output_stride, scale_stride, scale_output_stride,
            zero_stride, zero_output_stride, index, num_splits, LAYOUT, SPLITS, K,
        )  # fmt: skip
    store_tile(out_ptr, total_MN, rows_M, outputs_N, num_rows, num_outputs)


@triton.jit
def gptq_sum(
    x_ptrs_M, is_row_M, weight_ptr, scale_ptr, zero_ptr, group_ptr,
    outputs_N, is_output_N, first_output, num_outputs, num_inputs, group_size,
    weight_stride, weight_output_stride, scale_stride, scale_output_stride,
    zero_stride, zero_output_stride, index, num_splits,
    LAYOUT: tl.constexpr, SPLITS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Sum the products of rows and of the weights of some outputs over one split of their inputs.

    In the layout "awq" the outputs are consecutive, from `first_output` on.
    """
    scale_ptrs_N = scale_ptr + outputs_N.to(tl.int64) * scale_output_stride
    total_MN = tl.zeros((x_ptrs_M.shape[0], outputs_N.shape[0]), tl.float32)
    begin, end = steps_of_split(index, tl.cdiv(num_inputs, K), num_splits, SPLITS)
    for step in range(begin, end):
        inputs_K = step * K + tl.arange(0, K)
        is_input_K = inputs_K < num_inputs
        x_MK = load_rows(x_ptrs_M, is_row_M, inputs_K, num_inputs)
        if LAYOUT == "awq":
            packed_KN = _packed_along_outputs(
                weight_ptr + inputs_K.to(tl.int64) * weight_stride, is_input_K,
                first_output, num_outputs, weight_output_stride, outputs_N.shape[0],
            )  # fmt: skip
        else:
            packed_KN = _packed_along_inputs(
                weight_ptr + outputs_N.to(tl.int64) * weight_output_stride, is_output_N,
                step * K, num_inputs, weight_stride, K,
            )  # fmt: skip
        group_K1 = _groups(group_ptr, step * K // group_size, inputs_K, num_inputs)
        mask_KN = (group_K1 >= 0) & is_output_N[None, :]
        if zero_ptr is None:
            packed_KN -= 8
        else:
            zero_ptrs_K1 = zero_ptr + group_K1 * zero_stride
            packed_KN -= _zeros(zero_ptrs_K1, outputs_N, zero_output_stride, mask_KN, LAYOUT)
        scale_ptrs_KN = scale_ptrs_N[None, :] + group_K1 * scale_stride
        scale_KN = tl.load(scale_ptrs_KN, mask=mask_KN, other=0).to(tl.float32)
        weight_KN = packed_KN.to(tl.float32) * scale_KN
        total_MN = dot(x_MK, weight_KN.to(x_MK.dtype), total_MN)
    return total_MN


@triton.jit
def _groups(group_ptr, group, inputs_K, num_inputs):
    """The groups of inputs, `[K, 1]`, by the table; without it their common group, `[1, 1]`."""
    if group_ptr is None:
        return tl.full((1, 1), group, tl.int64)
    else:
        groups_K = tl.load(group_ptr + inputs_K, mask=inputs_K < num_inputs, other=0)
        return groups_K.to(tl.int64)[:, None]


@triton.jit
def _zeros(ptrs_K1, outputs_N, stride, mask_KN, LAYOUT: tl.constexpr):
    """Load the zeros of outputs from words of eight."""
    ptrs_KN = ptrs_K1 + (outputs_N // 8).to(tl.int64)[None, :] * stride
    words_KN = tl.load(ptrs_KN, mask=mask_KN, other=0)
    zeros_KN = (words_KN >> _shift_of(outputs_N % 8, LAYOUT)[None, :]) & 15
    return zeros_KN + (LAYOUT == "gptq")


@triton.jit
def _packed_along_inputs(
    word_ptrs_N, is_output_N, first_input, num_inputs, stride, K: tl.constexpr
):
    """Load the weights `[K, N]` from words of eight inputs."""
    words = first_input // 8 + tl.arange(0, K // 8)
    ptrs = word_ptrs_N[None, :] + words.to(tl.int64)[:, None] * stride
    mask = (words * 8 < num_inputs)[:, None] & is_output_N[None, :]
    packed = tl.load(ptrs, mask=mask, other=0)[:, None, :]
    packed = (packed >> _shift_of(tl.arange(0, 8), "gptq")[None, :, None]) & 15
    return tl.reshape(packed, (K, word_ptrs_N.shape[0]))


@triton.jit
def _packed_along_outputs(
    word_ptrs_K, is_input_K, first_output, num_outputs, stride, N: tl.constexpr
):
    """Load the weights `[K, N]` from words of eight outputs."""
    words = first_output // 8 + tl.arange(0, N // 8)
    ptrs = word_ptrs_K[:, None] + words.to(tl.int64)[None, :] * stride
    mask = is_input_K[:, None] & (words * 8 < num_outputs)[None, :]
    packed = tl.load(ptrs, mask=mask, other=0)[:, :, None]
    packed = (packed >> _shift_of(tl.arange(0, 8), "awq")[None, None, :]) & 15
    return tl.reshape(packed, (word_ptrs_K.shape[0], N))


@triton.jit
def _shift_of(place, LAYOUT: tl.constexpr):
    """The bit shift of the weight at a place from 0 to 7 in its word."""
    if LAYOUT == "awq":
        return (place // 2 + place % 2 * 4) * 4
    else:
        return place * 4


def variants() -> tuple[Variant, ...]:
    """Groups of 128 inputs: GPTQ decoding and prompts, and AWQ."""
    return (
        _variant("gptq", Tiling(16, 64)),
        _variant("gptq", Tiling(128, 128)),
        _variant("awq", Tiling(16, 64)),
    )


def _variant(layout: str, tiling: Tiling) -> Variant:
    return product_variant(
        f"{layout}_{tiling.rows}",
        _gptq_kernel,
        {
            "x_ptr": "*bf16",
            "weight_ptr": "*i32",
            "scale_ptr": "*fp16",
            "zero_ptr": "*i32",
            "out_ptr": "*bf16",
        },
        {
            "group_ptr": None,
            "weight_output_stride": 1,
            "scale_output_stride": 1,
            "zero_output_stride": 1,
            "LAYOUT": layout,
            **tiling.constants,
            "K": MAX_STEP_INPUTS,
        },
        tiling.num_warps,
    )
