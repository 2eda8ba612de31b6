"""Tiles of matrix products: their shapes, their order, and sums over parts of the inputs.

Owns the common parts of the products in this folder. Knows no format of weights.

A product over many inputs and few rows has too few tiles to fill a device, so its inputs are split:
each part is summed by a program of its own, and the parts are added in order. In deterministic mode
tile and splits depend only on the weight's shape; a large batch then sums the same parts one after
another in one program, and a row's result is the same to the last bit in any batch.

Shapes: T rows, O outputs, P parts, M rows and N outputs of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.variant import Variant

_MIN_TILE = 16
_FIXED_TILE_ROWS = 64
_MAX_TILE_ROWS = 128
_NUM_PROGRAMS = 264
"""Two for each multiprocessor of a large device."""
_MIN_STEPS = 4
"""A part with fewer steps over inputs is not worth its program."""
_MAX_SPLITS = 16
_SUM_BLOCK = 1024
NUM_STAGES = 3
"""Loading stages in the loop of a product. Always passed on, since the default is a device's."""

VARYING = ("num_rows", "num_splits", "num_parts", "num_tiles", "num_pairs", "num_blocks")
"""Sizes of a step, or of no use to a compiler: special values do not compile a kernel again."""

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class Tiling:
    """`num_splits` parts of the inputs, of which each program sums `splits_per_program`."""

    rows: int
    outputs: int
    num_splits: int = 1
    splits_per_program: int = 1

    @property
    def num_parts(self) -> int:
        """The number of sums written for each result."""
        return self.num_splits // self.splits_per_program

    @property
    def num_warps(self) -> int:
        """The warps of a program."""
        return 8 if self.rows * self.outputs >= 128 * 128 else 4

    @property
    def constants(self) -> dict[str, int]:
        """The tiling as constants of a kernel."""
        return {"SPLITS": self.splits_per_program, "M": self.rows, "N": self.outputs}

    def num_tiles(self, num_rows: int, num_outputs: int) -> int:
        """The tiles of a whole result."""
        return ceil_div(num_rows, self.rows) * ceil_div(num_outputs, self.outputs)


def choose_tiling(
    num_rows: int, num_outputs: int, num_steps: int, *, is_deterministic: bool
) -> Tiling:
    """Choose a tiling for a product whose inputs are read in `num_steps` steps.

    If `is_deterministic`, results do not depend on `num_rows`.
    """
    nominal_rows = _FIXED_TILE_ROWS if is_deterministic else num_rows
    rows = tile_size(nominal_rows, _MAX_TILE_ROWS)
    tiling = Tiling(rows, 128 if rows == _MAX_TILE_ROWS else 64)
    tiling = split_to_fill(tiling, nominal_rows, num_outputs, num_steps)
    if is_deterministic and num_rows > rows:
        return replace(tiling, splits_per_program=tiling.num_splits)
    return tiling


def split_to_fill(tiling: Tiling, num_rows: int, num_outputs: int, num_steps: int) -> Tiling:
    """Use as many splits as fill a device, if they are long enough."""
    wanted = _NUM_PROGRAMS // tiling.num_tiles(num_rows, num_outputs)
    return replace(tiling, num_splits=max(1, min(wanted, num_steps // _MIN_STEPS, _MAX_SPLITS)))


def are_on_one_device(*tensors: torch.Tensor | None) -> bool:
    """Whether one kernel can read all of them."""
    return len({tensor.device for tensor in tensors if tensor is not None}) == 1


def tile_size(size: int, most: int) -> int:
    """The smallest power of two that holds `size`, within what a product can take."""
    return min(most, max(_MIN_TILE, 1 << (size - 1).bit_length()))


def ceil_div(dividend: int, divisor: int) -> int:
    """Divide and round up."""
    return -(-dividend // divisor)


def multiply(
    kernel: Any,
    x_TI: torch.Tensor,
    weights: Sequence[torch.Tensor | None],
    sizes: Sequence[int],
    tiling: Tiling,
    out_dtype: torch.dtype,
    **constants: Any,
) -> torch.Tensor:
    """Run the kernel of a product, which writes `tiling.num_parts` parts, and add the parts.

    Its arguments are the rows, `weights`, the parts, the number of rows, `sizes` (first the number
    of outputs), the number of splits, and the constants of the tiling and of the product.
    """
    num_rows, num_outputs, num_parts = len(x_TI), sizes[0], tiling.num_parts
    dtype = out_dtype if num_parts == 1 else torch.float32
    out_PTO = x_TI.new_empty(num_parts, num_rows, num_outputs, dtype=dtype)
    kernel[tiling.num_tiles(num_rows, num_outputs), num_parts](
        x_TI,
        *weights,
        out_PTO,
        num_rows,
        *sizes,
        tiling.num_splits,
        **tiling.constants,
        **constants,
        num_warps=tiling.num_warps,
        num_stages=NUM_STAGES,
    )
    return out_PTO[0] if num_parts == 1 else add_parts(out_PTO, out_dtype)


def add_parts(parts_PTO: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Add float32 parts, in their order, and round once."""
    num_parts, *shape = parts_PTO.shape
    out_TO = parts_PTO.new_empty(shape, dtype=out_dtype)
    size = out_TO.numel()
    grid = (ceil_div(size, _SUM_BLOCK),)
    _add_parts_kernel[grid](
        parts_PTO, out_TO, size, num_parts, BLOCK=_SUM_BLOCK, num_stages=NUM_STAGES
    )
    return out_TO


@triton.jit(do_not_specialize=VARYING)
def _add_parts_kernel(parts_ptr, out_ptr, size, num_parts, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _part in range(num_parts):
        total += tl.load(parts_ptr + index, mask=index < size)
        parts_ptr += size
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=index < size)


@triton.jit
def tile_of_program(num_rows, num_outputs, M: tl.constexpr, N: tl.constexpr):
    """This program's first output, its rows and outputs, and which of them exist.

    Tiles that share weights run close together.
    """
    num_row_tiles, num_output_tiles = tl.cdiv(num_rows, M), tl.cdiv(num_outputs, N)
    program = tl.program_id(0)
    row_tile, output_tile = tl.swizzle2d(
        program // num_output_tiles, program % num_output_tiles, num_row_tiles, num_output_tiles, 8
    )
    rows_M, outputs_N = row_tile * M + tl.arange(0, M), output_tile * N + tl.arange(0, N)
    return output_tile * N, rows_M, outputs_N, rows_M < num_rows, outputs_N < num_outputs


@triton.jit
def steps_of_split(index, num_steps, num_splits, SPLITS: tl.constexpr):
    """The first step over inputs of this program's split `index`, and the one after its last."""
    split = tl.program_id(1) * SPLITS + index
    length = tl.cdiv(num_steps, num_splits)
    return split * length, tl.minimum((split + 1) * length, num_steps)


@triton.jit
def load_rows(row_ptrs, is_row, inputs_K, num_inputs):
    """Load some inputs of the rows at `row_ptrs`; zeros where there are none."""
    mask = is_row[:, None] & (inputs_K < num_inputs)[None, :]
    return tl.load(row_ptrs[:, None] + inputs_K[None, :], mask=mask, other=0)


@triton.jit
def dot(a, b, total):
    """`total + a @ b`, in float32; float32 operands are not rounded."""
    if IS_INTERPRETED and a.dtype == tl.bfloat16:  # numpy would multiply its bits as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def store_tile(out_ptr, total_MN, rows_M, outputs_N, num_rows, num_outputs):
    """Store a tile in the part given by the second axis of the grid."""
    part_rows_M = tl.program_id(1).to(tl.int64) * num_rows + rows_M
    offsets_MN = part_rows_M[:, None] * num_outputs + outputs_N[None, :]
    mask_MN = (rows_M < num_rows)[:, None] & (outputs_N < num_outputs)[None, :]
    tl.store(out_ptr + offsets_MN, total_MN.to(out_ptr.dtype.element_ty), mask=mask_MN)


def product_variant(
    name: str,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    num_warps: int = 4,
) -> Variant:
    """A variant for a weight whose sizes are multiples of 16.

    Arguments that are neither among `types` nor `constants` are integers.
    """
    kinds = {**dict.fromkeys(constants, "constexpr"), **types}
    signature = {argument: kinds.get(argument, "i32") for argument in kernel.arg_names}
    aligned = {name for name, kind in signature.items() if kind[0] == "*" or kind == "i32"}
    return Variant(
        name=name,
        kernel=kernel,
        signature=signature,
        constants=constants,
        divisible=frozenset(aligned - set(VARYING)),
        num_warps=num_warps,
        num_stages=NUM_STAGES,
    )


def variants() -> tuple[Variant, ...]:
    """The sum over parts."""
    pointers = {"parts_ptr": "*fp32", "out_ptr": "*bf16"}
    constants = {"BLOCK": _SUM_BLOCK}
    return (product_variant("add_parts", _add_parts_kernel, pointers, constants),)
