"""Which rows share the next run of the model, so that runs are full and nobody waits too long.

Owns the choice, from plain numbers. Knows no plan and no tensor.

Rows that skip cost next to nothing, so they are never waited for: a row goes through its skips at
once and then stands at its next computed step. Rows at different steps so fall into step with each
other by themselves, and what is left to choose is who goes first when more stand there than one run
should take, and how many that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class ReadyPicture(Protocol):
    """A picture at a computed step."""

    @property
    def num_rows(self) -> int:
        """The guidance branches that compute now."""
        ...

    @property
    def num_left(self) -> int:
        """Computed steps to its end, this one included."""
        ...

    @property
    def due_s(self) -> float:
        """When it should be finished; infinity if it does not matter."""
        ...

    @property
    def place(self) -> tuple[int, ...]:
        """Its place in line, which is nobody else's."""
        ...


AnyReady = TypeVar("AnyReady", bound=ReadyPicture)


def urgency(row: ReadyPicture) -> tuple[float, int, tuple[int, ...]]:
    """What comes first, least first: by due time, and of those due together by most left.

    The latter finishes a set of pictures in the fewest runs (Hu's rule, optimal for chains of equal
    steps).
    """
    return row.due_s, -row.num_left, row.place


def fill_batch(ready: Sequence[AnyReady], run_s: Sequence[float]) -> list[AnyReady]:
    """Who computes next. `run_s[b - 1]` is how long a run of b rows takes, as measured.

    By urgency; as many as make a row cheapest, and of equals the more: where a larger run is no
    faster per row, a smaller one answers sooner. The first is never passed over, so nobody starves.
    """
    order = sorted(ready, key=urgency)
    best: list[AnyReady] = []
    best_s, num_rows = float("inf"), 0
    for count, row in enumerate(order, start=1):
        num_rows += row.num_rows
        if num_rows > len(run_s):
            break
        per_row_s = run_s[num_rows - 1] / num_rows
        if per_row_s <= best_s:
            best, best_s = order[:count], per_row_s
    return best or order[:1]
