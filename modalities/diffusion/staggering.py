"""Which rows share the next run of the model, so that runs are full and nobody waits too long.

Owns the choice, from plain numbers. Imports no torch: schedulers may use it.

Rows that skip cost next to nothing, so they are never waited for: a row goes through its skips at
once and then stands at its next computed step. Rows at different steps so fall into step with each
other by themselves, and what is left to choose is who goes first when more stand there than one run
should take, and how many that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A picture at a computed step.

    `num_rows`: the guidance branches that compute now. `num_left`: computed steps to its end, this
    one included. `due_s`: when it should be finished, infinity if it does not matter.
    """

    name: str
    num_rows: int
    num_left: int
    due_s: float


def fill_batch(ready: Sequence[Ready], run_s: Sequence[float]) -> list[Ready]:
    """Who computes next. `run_s[b - 1]` is how long a run of b rows takes, as measured.

    By due time; of those due together, whoever has most left goes first, which finishes a set of
    pictures in the fewest runs (Hu's rule, optimal for chains of equal steps). As many as make a
    row cheapest, and of equals the more: where a larger run is no faster per row, a smaller one
    answers sooner. The first is never passed over, so nobody starves.
    """
    order = sorted(ready, key=lambda row: (row.due_s, -row.num_left, row.name))
    best: list[Ready] = []
    best_s, num_rows = float("inf"), 0
    for count, row in enumerate(order, start=1):
        num_rows += row.num_rows
        if num_rows > len(run_s):
            break
        per_row_s = run_s[num_rows - 1] / num_rows
        if per_row_s <= best_s:
            best, best_s = order[:count], per_row_s
    return best or order[:1]
