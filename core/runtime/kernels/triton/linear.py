"""Linear projection with plain weights, whose rows can be made independent of their batch.

Owns the kernel, and the dense sum of a tile that other products here use. Vendors' libraries choose
their kernel by the number of rows; this one does not have to.

Shapes: T rows, I inputs, O outputs, P parts, M rows, N outputs and K inputs of a tile's step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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

STEP_INPUTS = 64


def launch_linear(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    out_dtype: torch.dtype,
    deterministic: bool = False,
) -> torch.Tensor:
    """Compute `x_TI @ weight_OI.T`, summed in float32. The last axes are dense."""
    (num_rows, num_inputs), num_outputs = x_TI.shape, weight_OI.shape[0]
    _check(x_TI, weight_OI)
    tiling = choose_tiling(
        num_rows, num_outputs, ceil_div(num_inputs, STEP_INPUTS), is_deterministic=deterministic
    )
    sizes = num_outputs, num_inputs, x_TI.stride(0), weight_OI.stride(0)
    return multiply(_linear_kernel, x_TI, (weight_OI,), sizes, tiling, out_dtype, K=STEP_INPUTS)


linear = define_operator("linear", launch_linear)


@fake_of(linear)
def _(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    out_dtype: torch.dtype,
    deterministic: bool = False,
) -> torch.Tensor:
    _check(x_TI, weight_OI)
    return x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0], dtype=out_dtype)


def _check(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> None:
    assert are_on_one_device(x_TI, weight_OI)
    assert x_TI.shape[1] == weight_OI.shape[1]
    assert x_TI.dtype == weight_OI.dtype
    assert x_TI.stride(1) == weight_OI.stride(1) == 1


def reference(x_TI: torch.Tensor, weight_OI: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """The product in float32, rounded once."""
    return (x_TI.float() @ weight_OI.float().t()).to(out_dtype)


@triton.jit(do_not_specialize=VARYING)
def _linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    weight_stride,
    num_splits,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    _, rows_M, outputs_N, is_row_M, is_output_N = tile_of_program(num_rows, num_outputs, M, N)
    x_ptrs_M = x_ptr + rows_M.to(tl.int64) * x_stride
    weight_ptrs_N = weight_ptr + outputs_N.to(tl.int64) * weight_stride
    total_MN = tl.zeros((M, N), tl.float32)
    for index in range(SPLITS):
        total_MN += dense_sum(
            x_ptrs_M,
            is_row_M,
            weight_ptrs_N,
            is_output_N,
            num_inputs,
            index,
            num_splits,
            SPLITS,
            K,
        )
    store_tile(out_ptr, total_MN, rows_M, outputs_N, num_rows, num_outputs)


@triton.jit
def dense_sum(
    x_ptrs_M,
    is_row_M,
    weight_ptrs_N,
    is_output_N,
    num_inputs,
    index,
    num_splits,
    SPLITS: tl.constexpr,
    K: tl.constexpr,
):
    """Sum the products of rows at `x_ptrs_M` and `weight_ptrs_N` over one split of their inputs."""
    begin, end = steps_of_split(index, tl.cdiv(num_inputs, K), num_splits, SPLITS)
    total_MN = tl.zeros((x_ptrs_M.shape[0], weight_ptrs_N.shape[0]), tl.float32)
    for step in range(begin, end):
        inputs_K = step * K + tl.arange(0, K)
        x_MK = load_rows(x_ptrs_M, is_row_M, inputs_K, num_inputs)
        weight_NK = load_rows(weight_ptrs_N, is_output_N, inputs_K, num_inputs)
        total_MN = dot(x_MK, weight_NK.T, total_MN)
    return total_MN


def variants() -> tuple[Variant, ...]:
    """Kernels for decoding and for prompts."""
    return tuple(
        product_variant(
            f"rows_{tiling.rows}",
            _linear_kernel,
            dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16"),
            {**tiling.constants, "K": STEP_INPUTS},
            tiling.num_warps,
        )
        for tiling in (Tiling(64, 64), Tiling(128, 128))
    )
