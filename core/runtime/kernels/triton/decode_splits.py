"""The division of decode rows' keys among programs, decided on the device by the rows' own lengths.

Owns the size of the grid, the keys of each program, and the place of its partial result. Knows no
attention.

Grids of captured steps are fixed, and lengths are on the device, so each program derives its part
from all lengths. Keys are counted in units. All rows together are wanted in a number of splits that
fills the device: a row has as many splits of nearly equal size as it needs for none to exceed that
share. One row of 128k keys thus does not keep 63 short ones waiting. Fixed splits have a constant
size instead: a row's result then depends only on its own tokens, at the price of needless splits in
large batches.

Shapes: B rows of a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

UNIT = 128
"""Keys of a unit: a multiple of every block of keys."""
MAX_ROWS = 256
"""Rows of a launch; each program reads all their lengths."""
FIXED_UNITS = 2
"""Units of a split whose size does not depend on other rows."""
_MAX_PARTIAL_VALUES = 2**24
_PROGRAMS_PER_PROCESSOR = 4
_UNIT = tl.constexpr(UNIT)
_FIXED_UNITS = tl.constexpr(FIXED_UNITS)
_MAX_ROWS = tl.constexpr(MAX_ROWS)


@dataclass(frozen=True, slots=True)
class DecodeSplits:
    """The parts of a launch: `num_parts` places, of which lengths decide how many are used.

    `limit` is the number of splits wanted for all rows; if `is_fixed`, the most of one row.
    """

    num_parts: int
    limit: int
    is_fixed: bool

    @classmethod
    def of_rows(
        cls, num_rows: int, max_keys: int, window: int | None, num_wanted: int | None
    ) -> DecodeSplits:
        """Divide rows that may be as long as `max_keys`; without `num_wanted` in fixed splits."""
        max_units = -(-max_keys // UNIT)
        if window is not None:  # it need not begin at a unit, so it may touch one more
            max_units = min(max_units, -(-(abs(window) - 1) // UNIT) + 1)
        if num_wanted is None:
            limit = -(-max_units // FIXED_UNITS)
            return cls(num_rows * limit, limit, is_fixed=True)
        return cls(min(num_wanted + num_rows, num_rows * max_units), num_wanted, is_fixed=False)


def divided_rows(
    num_rows: int, splits_of: Callable[[int], DecodeSplits], values_of_part: int
) -> Iterator[tuple[slice, DecodeSplits]]:
    """The rows of each launch, and its parts, of which `splits_of` has those of so many rows.

    Fixed splits of all rows would take too much memory for their partial results.
    """
    rows_at_once, one = MAX_ROWS, splits_of(1)
    if one.is_fixed:
        fitting = _MAX_PARTIAL_VALUES // (one.num_parts * values_of_part)
        rows_at_once = min(max(1, fitting), MAX_ROWS)
    for first in range(0, num_rows, rows_at_once):
        end = min(first + rows_at_once, num_rows)
        yield slice(first, end), splits_of(end - first)


def num_wanted_splits(device: torch.device, num_tiles: int) -> int:
    """Splits of all rows together that give each processor enough programs of `num_tiles`."""
    return -(-_PROGRAMS_PER_PROCESSOR * num_processors(device) // num_tiles)


@cache
def num_processors(device: torch.device) -> int:
    """Count the multiprocessors of a device."""
    if device.type != "cuda":
        return 1  # interpreted
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def keys_of_part(
    part, lengths_ptr, num_rows, limit, window, HAS_WINDOW: tl.constexpr, IS_FIXED: tl.constexpr
):
    """The row of a part, the splits of that row, and the part's keys: the first, and the end.

    The first may lie before the window. A part that is not used has no keys.
    """
    if IS_FIXED:
        row, split = part // limit, part % limit
        split_units = _FIXED_UNITS
    else:
        splits_B, split_units = _splits_of_rows(lengths_ptr, num_rows, limit, window, HAS_WINDOW)
        ends_B = tl.cumsum(splits_B)
        row = tl.minimum(tl.sum((ends_B <= part).to(tl.int32)), num_rows - 1)
        split = part - tl.sum(tl.where(tl.arange(0, _MAX_ROWS) < row, splits_B, 0))
    length = tl.load(lengths_ptr + row).to(tl.int32)
    first_unit, num_units = _units_of(length, window, HAS_WINDOW)
    num_splits = tl.cdiv(num_units, split_units)
    size = tl.cdiv(num_units, tl.maximum(num_splits, 1))
    begin = (first_unit + split * size) * _UNIT
    end = tl.where(split < num_splits, tl.minimum(begin + size * _UNIT, length), begin)
    return row, num_splits, begin, end


@triton.jit
def parts_of_row(
    row, lengths_ptr, num_rows, limit, window, HAS_WINDOW: tl.constexpr, IS_FIXED: tl.constexpr
):
    """The first part of a row, and its number of parts."""
    if IS_FIXED:
        length = tl.load(lengths_ptr + row).to(tl.int32)
        _, num_units = _units_of(length, window, HAS_WINDOW)
        return row * limit, tl.cdiv(num_units, _FIXED_UNITS)
    else:
        splits_B, _ = _splits_of_rows(lengths_ptr, num_rows, limit, window, HAS_WINDOW)
        row_B = tl.arange(0, _MAX_ROWS)
        first = tl.sum(tl.where(row_B < row, splits_B, 0))
        return first, tl.sum(tl.where(row_B == row, splits_B, 0))


@triton.jit
def _splits_of_rows(lengths_ptr, num_rows, num_wanted, window, HAS_WINDOW: tl.constexpr):
    """The number of splits of each row, and the most units of a split."""
    row_B = tl.arange(0, _MAX_ROWS)
    length_B = tl.load(lengths_ptr + row_B, mask=row_B < num_rows, other=0).to(tl.int32)
    _, num_units_B = _units_of(length_B, window, HAS_WINDOW)
    split_units = tl.maximum(tl.cdiv(tl.sum(num_units_B), num_wanted), 1)
    return tl.cdiv(num_units_B, split_units), split_units


@triton.jit
def _units_of(length, window, HAS_WINDOW: tl.constexpr):
    """The unit of the first key that a row sees, and the number of units up to its end."""
    first_unit = length * 0
    if HAS_WINDOW:
        first_unit = first_of_window(length, window) // _UNIT
    return first_unit, tl.cdiv(length, _UNIT) - first_unit


@triton.jit
def first_of_window(length, window):
    """The first key that the last token of a row sees; a negative window is a chunk."""
    last = tl.maximum(length - 1, 0)
    return tl.where(window > 0, tl.maximum(length - window, 0), last - last % tl.abs(window))
