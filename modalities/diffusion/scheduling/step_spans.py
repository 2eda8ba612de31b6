"""A picture's way from noise to its end: what it takes of a step, and where it is shown.

Owns the arithmetic of a `PlannedSteps`. Knows no queue and no time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from triptych.modalities.diffusion.plan import PlannedSteps


class StepSpan(NamedTuple):
    """Steps taken together: those known to be skipped, and one that computes.

    `stop` steps of the whole way are done after it. `num_rows` guidance branches compute at its
    last step; none do where the way ends in skips.
    """

    num_steps: int
    stop: int
    num_rows: int


def strides(course: PlannedSteps) -> tuple[StepSpan, ...]:
    """The whole way, from the step it begins at."""
    found: list[StepSpan] = []
    start = course.first_step
    for stop in range(course.first_step + 1, course.num_steps + 1):
        num_rows = course.num_rows[stop - 1]
        if num_rows or stop == course.num_steps:
            found.append(StepSpan(stop - start, stop, num_rows))
            start = stop
    return tuple(found)


def preview_strides(way: Sequence[StepSpan], num_previews: int) -> tuple[int, ...]:
    """After which strides to show a picture, counted from 0, in order.

    Evenly over what is computed, and none at the end: of k previews the first comes after at most
    1 / (k + 2) of the work, so that it is early even if text and pixels take their time. A short
    way has fewer places than are asked for.
    """
    work = list(accumulate(stride.num_rows for stride in way))
    shown: list[int] = []
    for index in range(num_previews):
        share = (index + 1) / (num_previews + 2)
        at = bisect_right(work, share * work[-1]) - 1 if work else 0
        at = max(at, shown[-1] + 1 if shown else 0)
        if at >= len(way) - 1:
            break
        shown.append(at)
    return tuple(shown)
