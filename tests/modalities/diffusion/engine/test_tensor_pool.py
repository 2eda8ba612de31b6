"""Cells: taken once, given back once, zero when new; sums weigh each row by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.modalities.diffusion.engine.tensor_pool import (
    TensorPool,
    TensorPools,
    merge_rows,
    select_rows,
    weighted_sum,
)

CPU = torch.device("cpu")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=40))
def test_cells_are_conserved_and_keep_what_was_written(moves: list[int]) -> None:
    pool = TensorPool((2,), dtype=torch.float32, device=CPU)
    held: list[tuple[int, ...]] = []
    for value, move in enumerate(moves, start=1):
        if move and held:
            pool.give_back(held.pop(move % len(held)))
        else:
            cells = pool.take(move % 3 + 1)
            assert not pool.read(cells).any()
            pool.write(cells, torch.full((len(cells), 2), float(value)))
            held.append(cells)
        used = [cell for cells in held for cell in cells]
        assert len(set(used)) == len(used) == pool.num_used
    values = [pool.read(cells) for cells in held]
    assert all((value == value[0]).all() and value.any() for value in values)
    assert len({float(value[0, 0]) for value in values}) == len(values)


def test_a_cell_cannot_be_given_back_twice() -> None:
    pool = TensorPool((1,), dtype=torch.float32, device=CPU)
    cells = pool.take(2)
    pool.give_back(cells)
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(cells)


def test_pools_are_shared_by_kind_and_trimmed() -> None:
    pools = TensorPools()
    pool = pools.pool((4,), torch.float32, CPU)
    assert pools.pool(torch.Size([4]), torch.float32, CPU) is pool
    assert pools.pool((4,), torch.bfloat16, CPU) is not pool
    cells = pool.take(3)
    pools.trim()
    assert pools.num_used == 3
    assert pools.num_bytes == pool.num_bytes
    pool.give_back(cells)
    pools.trim()
    assert pools.num_bytes == 0


def test_a_weighted_sum_leaves_unwanted_columns_alone() -> None:
    broken = torch.full((2, 3), torch.nan)
    columns = [broken, torch.ones(2, 3), torch.full((2, 3), 2.0)]
    total = weighted_sum(np.array([[0.0, 1.0, 3.0], [0.0, -1.0, 0.0]]), columns)
    assert total.tolist() == [[7.0] * 3, [-1.0] * 3]
    assert not weighted_sum(np.zeros((2, 1)), [torch.ones(2, 3)]).any()


def test_parts_of_rows_are_picked_and_joined_again() -> None:
    whole = torch.arange(12.0).view(4, 3)
    assert select_rows(whole, [0, 1, 2, 3]) is whole
    parts = [(rows, select_rows(whole, rows)) for rows in ([3, 0], [2], [1])]
    assert parts[0][1].tolist() == [[9.0, 10.0, 11.0], [0.0, 1.0, 2.0]]
    assert torch.equal(merge_rows(parts), whole)
    assert torch.equal(merge_rows([([1, 0], whole[:2])]), whole[:2].flip(0))
