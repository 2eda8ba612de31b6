"""Metrics and predictions of step caches over whole tensors.

Owns the kernels over the diffusion engine's tensor pools, which read cells in place. A row is split
into parts by its own size only, so its results are the same in every batch.

Shapes: M cells, R rows, N values of a cell, K cells that a row reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.variant import Variant

_BLOCK_N = 2048
_PART = 16 * _BLOCK_N
"""Values of a row that one program adds up."""
_NUM_WARPS = 8


def launch_distances(
    values_RN: torch.Tensor, cells_MN: torch.Tensor, cells_R: torch.Tensor
) -> torch.Tensor:
    """The distance of each row from its cell: mean|value - cell| / mean|cell|, in float32."""
    _check_cells(cells_MN, cells_R)
    num_rows, size = values_RN.shape
    assert size == cells_MN.shape[1]
    assert cells_R.shape == (num_rows,)
    values_RN = values_RN.contiguous()
    num_parts = triton.cdiv(size, _PART)
    sums_R2P = values_RN.new_empty(num_rows, 2, num_parts, dtype=torch.float32)
    _distance_kernel[(num_rows, num_parts)](
        values_RN,
        cells_MN,
        cells_R,
        sums_R2P,
        size,
        PART=_PART,
        BLOCK_N=_BLOCK_N,
        num_warps=_NUM_WARPS,
        num_stages=2,
    )
    moved_R, whole_R = (sums_R2P.sum(-1) / size).unbind(1)
    return moved_R / (whole_R + 1e-9)


relative_distances = define_operator("relative_distances", launch_distances)


@fake_of(relative_distances)
def _(values_RN: torch.Tensor, cells_MN: torch.Tensor, cells_R: torch.Tensor) -> torch.Tensor:
    _check_cells(cells_MN, cells_R)
    return values_RN.new_empty(len(values_RN), dtype=torch.float32)


def launch_weighted(
    cells_MN: torch.Tensor, cells_KR: torch.Tensor, weights_KR: torch.Tensor
) -> torch.Tensor:
    """Each row's weighted sum of cells, in their order: `[R, N]`, float32.

    A cell with weight 0 is not read, so it may hold anything.
    """
    _check_cells(cells_MN, cells_KR)
    assert weights_KR.shape == cells_KR.shape
    assert weights_KR.dtype is torch.float32
    assert weights_KR.is_contiguous()
    (num_columns, num_rows), size = cells_KR.shape, cells_MN.shape[1]
    out_RN = cells_MN.new_empty(num_rows, size, dtype=torch.float32)
    _weighted_kernel[(triton.cdiv(size, _BLOCK_N), num_rows)](
        cells_MN,
        cells_KR,
        weights_KR,
        out_RN,
        num_rows,
        num_columns,
        size,
        BLOCK_N=_BLOCK_N,
        num_warps=_NUM_WARPS,
        num_stages=2,
    )
    return out_RN


weighted_cells = define_operator("weighted_cells", launch_weighted)


@fake_of(weighted_cells)
def _(cells_MN: torch.Tensor, cells_KR: torch.Tensor, weights_KR: torch.Tensor) -> torch.Tensor:
    _check_cells(cells_MN, cells_KR)
    return cells_MN.new_empty(cells_KR.shape[1], cells_MN.shape[1], dtype=torch.float32)


def _check_cells(cells_MN: torch.Tensor, numbers: torch.Tensor) -> None:
    assert cells_MN.dim() == 2
    assert cells_MN.is_contiguous()
    assert numbers.dtype is torch.int64
    assert numbers.is_contiguous()


@triton.jit(do_not_specialize_on_alignment=["numbers_ptr"])
def _distance_kernel(
    values_ptr,
    cells_ptr,
    numbers_ptr,
    sums_ptr,
    size,
    PART: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Two sums over one part of a row: of the differences, and of the cell's magnitudes."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values_ptr += row * size
    cells_ptr += tl.load(numbers_ptr + row) * size
    moved = tl.zeros([BLOCK_N], tl.float32)
    whole = tl.zeros([BLOCK_N], tl.float32)
    for offset in range(0, PART, BLOCK_N):
        at = part.to(tl.int64) * PART + offset + tl.arange(0, BLOCK_N)
        value = tl.load(values_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        cell = tl.load(cells_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        moved += tl.abs(value - cell)
        whole += tl.abs(cell)
    num_parts = tl.num_programs(1)
    tl.store(sums_ptr + 2 * row * num_parts + part, tl.sum(moved, axis=0))
    tl.store(sums_ptr + (2 * row + 1) * num_parts + part, tl.sum(whole, axis=0))


@triton.jit(
    do_not_specialize=["num_rows", "num_columns"],
    do_not_specialize_on_alignment=["numbers_ptr", "weights_ptr"],
)
def _weighted_kernel(
    cells_ptr,
    numbers_ptr,
    weights_ptr,
    out_ptr,
    num_rows,
    num_columns,
    size,
    BLOCK_N: tl.constexpr,
):
    """Compute some values of one row."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for column in range(num_columns):
        weight = tl.load(weights_ptr + column * num_rows + row)
        if weight != 0:
            cell = tl.load(numbers_ptr + column * num_rows + row)
            values = tl.load(cells_ptr + cell * size + at, mask=at < size, other=0.0)
            total += weight * values.to(tl.float32)
    tl.store(out_ptr + row * size + at, total, mask=at < size)


def variants() -> tuple[Variant, ...]:
    """Signals in bfloat16, outputs in float32."""
    constants = {"PART": _PART, "BLOCK_N": _BLOCK_N}
    return (
        Variant(
            name="distances_bf16",
            kernel=_distance_kernel,
            signature={
                "values_ptr": "*bf16",
                "cells_ptr": "*bf16",
                "numbers_ptr": "*i64",
                "sums_ptr": "*fp32",
                "size": "i32",
                **dict.fromkeys(constants, "constexpr"),
            },
            constants=constants,
            divisible=frozenset({"values_ptr", "cells_ptr", "sums_ptr", "size"}),
            num_warps=_NUM_WARPS,
        ),
        Variant(
            name="weighted",
            kernel=_weighted_kernel,
            signature={
                "cells_ptr": "*fp32",
                "numbers_ptr": "*i64",
                "weights_ptr": "*fp32",
                "out_ptr": "*fp32",
                "num_rows": "i32",
                "num_columns": "i32",
                "size": "i32",
                "BLOCK_N": "constexpr",
            },
            constants={"BLOCK_N": _BLOCK_N},
            divisible=frozenset({"cells_ptr", "out_ptr", "size"}),
            num_warps=_NUM_WARPS,
        ),
    )
