"""Which rows share the next run of the model, so that runs are full and no image waits too long.

Owns the choice, from plain numbers.

Rows that skip cost next to nothing, so they are never waited for: a row goes through its skips at
once and then stands at its next computed step. Rows at different steps so fall into step with each
other by themselves, and what is left to choose is the order when more stand there than one run
should take, and how many that is.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from triptych.modalities.diffusion.scheduling.state import ImageState

_OPTIMISM = 0.98  # of a row's time, for each doubling away from what was measured


def urgency(row: ImageState) -> tuple[float, int, tuple[int, ...]]:
    """What comes first, least first: by due time, and of those due together by most left.

    The latter finishes a set of images in the fewest runs (Hu's rule, optimal for chains of equal
    steps).
    """
    return row.due_s, -row.num_left, row.place


def fill_batch(order: Sequence[ImageState], run_s: Sequence[float]) -> list[ImageState]:
    """Which images compute next. `run_s[b - 1]` is how long a run of b rows takes, as measured.

    In `order`, the most urgent first; as many as make a row cheapest, and of equals the more: where
    a larger run is no faster per row, a smaller one answers sooner. The first is never passed over,
    so none starves.
    """
    best: list[ImageState] = []
    best_s, num_rows = float("inf"), 0
    for count, row in enumerate(order, start=1):
        num_rows += row.num_rows
        if num_rows > len(run_s):
            break
        per_row_s = run_s[num_rows - 1] / num_rows
        if per_row_s <= best_s:
            best, best_s = list(order[:count]), per_row_s
    return best or list(order[:1])


def run_table(measured: Sequence[float | None], alone_s: float) -> list[float]:
    """How long a run of b rows takes at `[b - 1]`, from the runs that were `measured`.

    A device that is full takes twice as long for twice the rows, an empty one takes no longer at
    all, and where between the two a model stands can only be measured. Between numbers of rows
    that were, seconds lie on a line. Beyond them a row is taken to be a little cheaper than at the
    nearest, and more so further away: so it will be tried. `alone_s` is for one row, where nothing
    was measured yet.
    """
    known = [(rows, run_s) for rows, run_s in enumerate(measured, start=1) if run_s is not None]
    return [_run_s(known or [(1, alone_s)], rows) for rows in range(1, len(measured) + 1)]


def _run_s(known: Sequence[tuple[int, float]], num_rows: int) -> float:
    at = bisect_left(known, (num_rows, 0.0))
    if 0 < at < len(known):
        (low, low_s), (high, high_s) = known[at - 1 : at + 1]
        return low_s + (high_s - low_s) * (num_rows - low) / (high - low)
    nearest, nearest_s = known[min(at, len(known) - 1)]
    ratio = num_rows / nearest
    return nearest_s * ratio * math.pow(_OPTIMISM, abs(math.log2(ratio)))
