"""The schedule of decode attention: every key once, and no program with much too many."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton
import triton.language as tl

from support.kernel_device import on_device
from triptych.core.runtime.kernels.triton.decode_splits import (
    FIXED_UNITS,
    UNIT,
    DecodeSplits,
    keys_of_part,
    parts_of_row,
)

pytestmark = pytest.mark.gpu
_ENDLESS = 2**30
PROGRAMS_OF_H100 = 66
"""Splits wanted for the eight key-value heads of Llama 3 8B: four programs per processor."""


@triton.jit
def _parts_kernel(lengths_ptr, out_ptr, num_rows, limit, window, IS_FIXED: tl.constexpr):
    part = tl.program_id(0)
    row, num_splits, begin, end = keys_of_part(
        part, lengths_ptr, num_rows, limit, window, True, IS_FIXED
    )
    tl.store(out_ptr + part * 4, row)
    tl.store(out_ptr + part * 4 + 1, num_splits)
    tl.store(out_ptr + part * 4 + 2, begin)
    tl.store(out_ptr + part * 4 + 3, end)


@triton.jit
def _rows_kernel(lengths_ptr, out_ptr, num_rows, limit, window, IS_FIXED: tl.constexpr):
    row = tl.program_id(0)
    first, num_parts = parts_of_row(row, lengths_ptr, num_rows, limit, window, True, IS_FIXED)
    tl.store(out_ptr + row * 2, first)
    tl.store(out_ptr + row * 2 + 1, num_parts)


@on_device
def _schedule(
    lengths_B: torch.Tensor, splits: DecodeSplits, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row, splits, first key and end of each part; first part and number of parts of each row."""
    parts_S4 = torch.empty(splits.num_parts, 4, dtype=torch.int32, device=lengths_B.device)
    rows_B2 = torch.empty(len(lengths_B), 2, dtype=torch.int32, device=lengths_B.device)
    args = (len(lengths_B), splits.limit, _ENDLESS if window is None else window, splits.is_fixed)
    _parts_kernel[(splits.num_parts,)](lengths_B, parts_S4, *args)
    _rows_kernel[(len(lengths_B),)](lengths_B, rows_B2, *args)
    return parts_S4, rows_B2


def _keys_by_program(
    lengths: list[int], max_keys: int, window: int | None, num_wanted: int | None
) -> list[int]:
    """The keys of each used part; each row's keys are in its parts, once and in order."""
    splits = DecodeSplits.of_rows(len(lengths), max_keys, window, num_wanted)
    parts_S4, rows_B2 = _schedule(torch.tensor(lengths), splits, window)
    of_row = defaultdict(list)
    for part, (row, num_splits, begin, end) in enumerate(parts_S4.tolist()):
        if begin < end:
            of_row[row].append((part, num_splits, begin, end))
    for row, length in enumerate(lengths):
        first, num_parts = rows_B2[row].tolist()
        assert [part for part, *_ in of_row[row]] == [*range(first, first + num_parts)]
        assert {num_splits for _, num_splits, *_ in of_row[row]} <= {num_parts}
        spans = [(begin, end) for *_, begin, end in of_row[row]]
        assert [end for _, end in spans[:-1]] == [begin for begin, _ in spans[1:]]
        if length:
            first_key = 0 if window is None else max(length - window, 0)
            assert spans[0][0] == first_key // UNIT * UNIT
            assert spans[-1][1] == length
    return [end - begin for each in of_row.values() for *_, begin, end in each]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=9),
    window=st.one_of(st.none(), st.sampled_from([1, 2, 128, 129, 1000])),
    num_wanted=st.one_of(st.none(), st.integers(1, 40)),
)
def test_every_key_is_in_one_part(
    lengths: list[int], window: int | None, num_wanted: int | None
) -> None:
    sizes = _keys_by_program(lengths, max(*lengths, 1), window, num_wanted)
    if num_wanted is None:
        assert max(sizes, default=0) <= FIXED_UNITS * UNIT


@pytest.mark.parametrize(
    "lengths",
    [
        [131_072, *[1024] * 63],
        [2100] * 32,
        [1024] * 64,
        [32_768],
        [4096 * 2**-step for step in range(8)] * 8,
        list(range(1, 8000, 125)),
    ],
    ids=["one of 128k", "32 of 2,100", "64 of 1k", "one of 32k", "halved", "ramp"],
)
def test_no_program_has_much_more_than_its_share(lengths: list[float]) -> None:
    """The longest program of a step ends it: splits by the longest possible row took 64k keys."""
    whole = [int(length) for length in lengths]
    sizes = _keys_by_program(whole, 131_072, None, PROGRAMS_OF_H100)
    assert max(sizes) <= sum(whole) / PROGRAMS_OF_H100 + 2 * UNIT
    assert len(sizes) <= PROGRAMS_OF_H100 + len(whole)


def test_in_fixed_splits_a_row_is_divided_the_same_in_any_batch() -> None:
    alone, together = ([700], [700, 90_000, 3])
    assert _keys_by_program(alone, 1000, None, None) == [256, 256, 188]
    assert _keys_by_program(together, 100_000, None, None)[:3] == [256, 256, 188]
