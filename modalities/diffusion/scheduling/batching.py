"""Which rows share the next run of the model, so that runs are full and no image waits too long.

Owns the choice, from plain numbers.

Skipped steps cost next to nothing, so a row passes its skips at once and then stands at its next
computed step. Rows at different steps therefore align by themselves; what remains to be chosen is
how many rows one run takes, and which of them if there are more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from triptych.modalities.diffusion.scheduling.state import ImageState

_OPTIMISM = 0.98  # factor on a row's time per doubling away from the nearest measurement


def urgency(row: ImageState) -> tuple[float, int, tuple[int, ...]]:
    """The sort key of rows, most urgent first: by due time, then by most steps left.

    The latter finishes a set of images in the fewest runs (Hu's rule, optimal for chains of equal
    steps).
    """
    return row.due_s, -row.num_left, row.place


def fill_batch(order: Sequence[ImageState], run_s: Sequence[float]) -> list[ImageState]:
    """The images that compute next. `run_s[b - 1]` is the duration of a run of b rows.

    The first ones in `order`, the most urgent first: as many as make a row cheapest, and of equals
    the more. Where a larger run is slower per row, a smaller one answers sooner. The first image is
    always included, so none starves.
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
    """The duration of a run of b rows at `[b - 1]`, from the `measured` runs.

    A full device takes twice as long for twice the rows, an empty one takes no longer at all; where
    a model stands between the two can only be measured. Between measured numbers of rows the
    duration is interpolated linearly. Beyond them a row is assumed to be a little cheaper than at
    the nearest, and more so further away, so that such runs are tried. `alone_s` is the duration of
    one row before any measurement.
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
