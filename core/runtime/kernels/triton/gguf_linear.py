"""Linear projection with weights in the blocks of a GGUF file, as stored.

Owns the products; `gguf_blocks` owns the formats. Weights become the type of `x` (float32 for a
single row) inside the product, and are never unpacked in memory.

Shapes: T rows, I inputs, O outputs, B bytes of a row of blocks, P parts, M rows and N outputs of a
tile, G groups of a step, L bytes of a group.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from triptych.core.block_formats import FORMATS
from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.core.runtime.kernels.triton.gguf_blocks import (
    GROUPS,
    inputs_of_groups,
    weights_of_groups,
)
from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.tiling import (
    VARYING,
    Tiling,
    are_on_one_device,
    ceil_div,
    choose_tiling,
    dot,
    multiply,
    product_variant,
    split_to_fill,
    steps_of_split,
    store_tile,
    tile_of_program,
)
from triptych.core.runtime.kernels.triton.variant import Variant

_STEP_BYTES = {1: 128, 128: 32}
"""Bytes of each output in a step, by the rows of a tile: more would not fit the registers."""
_OTHER_STEP_BYTES = 64
_VECTOR_TILE = Tiling(1, 32)


def launch_gguf_linear(
    x_TI: torch.Tensor,
    blocks_OB: torch.Tensor,
    kind: str,
    out_dtype: torch.dtype,
    deterministic: bool = False,
) -> torch.Tensor:
    """Compute `x_TI @ weight_OI.T`, summed in float32; dense blocks of a format in `GROUPS`."""
    _check(x_TI, blocks_OB, kind)
    num_rows, num_outputs, groups = len(x_TI), len(blocks_OB), GROUPS[kind]
    num_blocks = blocks_OB.shape[1] // FORMATS[kind].num_bytes
    num_steps = ceil_div(num_blocks * groups.num_groups * groups.num_bytes, _OTHER_STEP_BYTES)
    if num_rows == 1 and not deterministic:
        kernel, tiling = _gguf_vector_kernel, split_to_fill(_VECTOR_TILE, 1, num_outputs, num_steps)
    else:
        kernel = _gguf_kernel
        tiling = choose_tiling(num_rows, num_outputs, num_steps, is_deterministic=deterministic)
    sizes = num_outputs, num_blocks, x_TI.stride(0)
    constants = gguf_constants(kind, tiling)
    return multiply(kernel, x_TI, (blocks_OB,), sizes, tiling, out_dtype, **constants)


gguf_linear = define_operator("gguf_linear", launch_gguf_linear)


@fake_of(gguf_linear)
def _(
    x_TI: torch.Tensor,
    blocks_OB: torch.Tensor,
    kind: str,
    out_dtype: torch.dtype,
    deterministic: bool = False,
) -> torch.Tensor:
    _check(x_TI, blocks_OB, kind)
    return x_TI.new_empty(x_TI.shape[0], blocks_OB.shape[0], dtype=out_dtype)


def _check(x_TI: torch.Tensor, blocks_OB: torch.Tensor, kind: str) -> None:
    assert are_on_one_device(x_TI, blocks_OB)
    assert FORMATS[kind].holds(x_TI.shape[1])
    assert blocks_OB.shape[1] == FORMATS[kind].row_bytes(x_TI.shape[1])
    assert x_TI.stride(1) == 1
    assert blocks_OB.is_contiguous()
    assert blocks_OB.dtype == torch.uint8


def reference(
    x_TI: torch.Tensor, blocks_OB: torch.Tensor, kind: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """The product in float32 with weights of the type of `x_TI`, rounded once."""
    weight_OI = PackedTensor(blocks_OB, FORMATS[kind]).dequantize(x_TI.dtype)
    return (x_TI.float() @ weight_OI.float().t()).to(out_dtype)


def gguf_constants(kind: str, tiling: Tiling) -> dict[str, Any]:
    """The constants of `gguf_sum`, and the number of groups of a block."""
    groups = GROUPS[kind]
    step_bytes = _STEP_BYTES.get(tiling.rows, _OTHER_STEP_BYTES)
    return {
        "KIND": kind,
        "BLOCK_GROUPS": groups.num_groups,
        "DISTANCE": groups.distance,
        "G": step_bytes // groups.num_bytes,
        "L": groups.num_bytes,
    }


@triton.jit(do_not_specialize=VARYING)
def _gguf_kernel(
    x_ptr,
    blocks_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_blocks,
    x_stride,
    num_splits,
    KIND: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    DISTANCE: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    L: tl.constexpr,
):
    _, rows_M, outputs_N, is_row_M, is_output_N = tile_of_program(num_rows, num_outputs, M, N)
    x_ptrs_M = x_ptr + rows_M.to(tl.int64) * x_stride
    first_blocks_N = outputs_N.to(tl.int64) * num_blocks
    total_MN = tl.zeros((M, N), tl.float32)
    for index in range(SPLITS):
        total_MN += gguf_sum(
            x_ptrs_M,
            is_row_M,
            blocks_ptr,
            first_blocks_N,
            is_output_N,
            num_blocks * BLOCK_GROUPS,
            index,
            num_splits,
            KIND,
            DISTANCE,
            SPLITS,
            G,
            L,
        )
    store_tile(out_ptr, total_MN, rows_M, outputs_N, num_rows, num_outputs)


@triton.jit
def gguf_sum(
    x_ptrs_M,
    is_row_M,
    blocks_ptr,
    first_blocks_N,
    is_output_N,
    num_groups,
    index,
    num_splits,
    KIND: tl.constexpr,
    DISTANCE: tl.constexpr,
    SPLITS: tl.constexpr,
    G: tl.constexpr,
    L: tl.constexpr,
):
    """Sum the products of rows and of the weights of some outputs over one split of their inputs.

    `first_blocks_N` are the numbers of the outputs' first blocks, of which each has `num_groups`.
    """
    total_MN = tl.zeros((x_ptrs_M.shape[0], first_blocks_N.shape[0]), tl.float32)
    begin, end = steps_of_split(index, tl.cdiv(num_groups, G), num_splits, SPLITS)
    for step in range(begin, end):
        groups_G = step * G + tl.arange(0, G)
        is_group_G = groups_G < num_groups
        low_NGL, high_NGL = weights_of_groups(
            blocks_ptr, first_blocks_N, is_output_N, groups_G, is_group_G, KIND, L
        )
        inputs_GL = inputs_of_groups(groups_G, KIND, L)
        total_MN = _add_product(x_ptrs_M, is_row_M, inputs_GL, is_group_G, low_NGL, total_MN)
        if DISTANCE:
            inputs_GL += DISTANCE
            total_MN = _add_product(x_ptrs_M, is_row_M, inputs_GL, is_group_G, high_NGL, total_MN)
    return total_MN


@triton.jit
def _add_product(x_ptrs_M, is_row_M, inputs_GL, is_group_G, weights_NGL, total_MN):
    x_MGL = tl.load(
        x_ptrs_M[:, None, None] + inputs_GL[None, :, :],
        mask=is_row_M[:, None, None] & is_group_G[None, :, None],
        other=0,
    )
    x_MK = _flat(x_MGL)
    return dot(x_MK, _flat(weights_NGL).to(x_MK.dtype).T, total_MN)


@triton.jit
def _flat(values):
    return tl.reshape(values, (values.shape[0], values.shape[1] * values.shape[2]))


@triton.jit(do_not_specialize=VARYING)
def _gguf_vector_kernel(
    x_ptr,
    blocks_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_blocks,
    x_stride,
    num_splits,
    KIND: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    DISTANCE: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    L: tl.constexpr,
):
    """Multiply one row: threads that unpack weights sum products, which are added up at the end."""
    outputs_N = tl.program_id(0) * N + tl.arange(0, N)
    is_output_N = outputs_N < num_outputs
    first_blocks_N = outputs_N.to(tl.int64) * num_blocks
    num_groups = num_blocks * BLOCK_GROUPS
    begin, end = steps_of_split(0, tl.cdiv(num_groups, G), num_splits, SPLITS)
    sums_NGL = tl.zeros((N, G, L), tl.float32)
    for step in range(begin, end):
        groups_G = step * G + tl.arange(0, G)
        is_group_G = groups_G < num_groups
        low_NGL, high_NGL = weights_of_groups(
            blocks_ptr, first_blocks_N, is_output_N, groups_G, is_group_G, KIND, L
        )
        x_ptrs_GL = x_ptr + inputs_of_groups(groups_G, KIND, L)
        x_GL = tl.load(x_ptrs_GL, mask=is_group_G[:, None], other=0)
        sums_NGL += low_NGL * x_GL.to(tl.float32)[None, :, :]
        if DISTANCE:
            x_GL = tl.load(x_ptrs_GL + DISTANCE, mask=is_group_G[:, None], other=0)
            sums_NGL += high_NGL * x_GL.to(tl.float32)[None, :, :]
    sums_N = tl.sum(tl.sum(sums_NGL, axis=2), axis=1)
    out_ptrs_N = out_ptr + tl.program_id(1).to(tl.int64) * num_outputs + outputs_N
    tl.store(out_ptrs_N, sums_N.to(out_ptr.dtype.element_ty), mask=is_output_N)


def variants() -> tuple[Variant, ...]:
    """Kernels of a K-quantized file: one row, a batch, a prompt; and one of small blocks."""
    return (
        _variant("q4_k", _VECTOR_TILE),
        _variant("q4_k", Tiling(16, 64)),
        _variant("q6_k", Tiling(128, 128)),
        _variant("q4_0", Tiling(16, 64)),
    )


def _variant(kind: str, tiling: Tiling) -> Variant:
    return product_variant(
        f"{kind}_{tiling.rows}",
        _gguf_vector_kernel if tiling == _VECTOR_TILE else _gguf_kernel,
        {"x_ptr": "*bf16", "blocks_ptr": "*u8", "out_ptr": "*bf16"},
        {**tiling.constants, **gguf_constants(kind, tiling)},
        tiling.num_warps,
    )
