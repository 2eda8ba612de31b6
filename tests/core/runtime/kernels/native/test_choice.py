"""The native choice of keys against the torch reference, which it equals exactly."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.index_case import chosen_slots, make_index
from support.latent_case import LatentSizes
from triptych.core.runtime.kernels.native import choice
from triptych.core.runtime.kernels.native.library import NativeKernels

FLOAT, HALF = torch.float32, torch.bfloat16
ROWS = st.lists(
    st.tuples(st.one_of(st.just(1), st.integers(1, 20)), st.integers(0, 150)).map(
        lambda pair: (pair[0], pair[0] + pair[1])
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25, deadline=None)
@given(
    rows=ROWS,
    num_chosen=st.integers(1, 60),
    index=st.sampled_from(((1, 1), (4, 8), (70, 33), (64, 128))),
    page_size=st.sampled_from((1, 16, 64)),
    dtypes=st.sampled_from(((FLOAT, FLOAT), (HALF, HALF), (HALF, torch.int8), (FLOAT, HALF))),
)
def test_agrees_with_torch_in_any_chunk(
    kernels: NativeKernels,
    rows: list[tuple[int, int]],
    num_chosen: int,
    index: tuple[int, int],
    page_size: int,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    case = make_index(rows, num_chosen, dtypes, index, LatentSizes(2, 24, 16, page_size))
    found, start = chosen_slots(case.choose(kernels)), 0
    assert found == chosen_slots(case.choose())
    for row, (length, _) in enumerate(rows):
        cuts = sorted({0, 1, length // 2, length})
        chunks = (chosen_slots(case.chunk(row, *ends).choose(kernels)) for ends in pairwise(cuts))
        assert [*chain.from_iterable(chunks)] == found[start : start + length]
        start += length


@pytest.mark.parametrize("most", [1, 400])
def test_few_scores_are_held_at_a_time(
    kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    case = make_index([(1, 1500), (9, 130)], 50)
    expected = chosen_slots(case.choose(kernels))
    monkeypatch.setattr(choice, "MAX_SCORES", most)
    assert chosen_slots(case.choose(kernels)) == expected == chosen_slots(case.choose())
