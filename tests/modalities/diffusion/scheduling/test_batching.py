"""Who computes next: fullest where that pays, first due first, and no run wasted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from triptych.modalities.diffusion.scheduling.batching import fill_batch, urgency


@dataclass(frozen=True)
class Ready:
    place: tuple[int, ...]
    num_rows: int = 1
    num_left: int = 5
    due_s: float = math.inf


READY = st.lists(
    st.tuples(st.integers(1, 2), st.integers(1, 30), st.sampled_from([1.0, 2.0, math.inf])),
    min_size=1,
    max_size=8,
).map(
    lambda rows: [
        Ready(place=(index,), num_rows=num_rows, num_left=left, due_s=due)
        for index, (num_rows, left, due) in enumerate(rows)
    ]
)


@given(READY, st.lists(st.floats(0.1, 5.0), min_size=2, max_size=9))
def test_the_most_urgent_always_runs_and_runs_fit(ready: list[Ready], run_s: list[float]) -> None:
    chosen = fill_batch(sorted(ready, key=urgency), run_s)
    assert chosen[0].due_s == min(row.due_s for row in ready)
    assert sum(row.num_rows for row in chosen) <= len(run_s)
    assert max(row.due_s for row in chosen) <= min(
        (row.due_s for row in ready if row not in chosen), default=math.inf
    )


def test_runs_are_as_large_as_pays() -> None:
    ready = [Ready(place=(i,)) for i in range(6)]
    free = [1.0] * 4  # four for the price of one
    linear = [1.0, 2.02, 3.03, 4.04]  # a full device: nothing won by batching
    assert len(fill_batch(sorted(ready, key=urgency), free)) == 4
    assert len(fill_batch(sorted(ready, key=urgency), linear)) == 1


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(1, 4))
def test_images_due_together_take_the_fewest_runs_there_can_be(
    left: list[int], capacity: int
) -> None:
    remaining = dict(enumerate(left))
    num_runs = 0
    while remaining:
        ready = [Ready(place=(row,), num_left=count) for row, count in remaining.items()]
        for chosen in fill_batch(sorted(ready, key=urgency), [1.0] * capacity):
            row = chosen.place[0]
            remaining[row] -= 1
            if not remaining[row]:
                del remaining[row]
        num_runs += 1
    assert num_runs == max(*left, math.ceil(sum(left) / capacity))
