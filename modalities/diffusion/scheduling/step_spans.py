"""An image's steps from noise to its end: which are taken together, and where it is shown.

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

    `stop` steps of the whole image are done after it. `num_rows` guidance branches compute at its
    last step; none do where the image ends in skips.
    """

    num_steps: int
    stop: int
    num_rows: int


def step_spans(planned: PlannedSteps) -> tuple[StepSpan, ...]:
    """All of an image's spans, from the step it begins at."""
    found: list[StepSpan] = []
    start = planned.first_step
    for stop in range(planned.first_step + 1, planned.num_steps + 1):
        num_rows = planned.num_rows[stop - 1]
        if num_rows or stop == planned.num_steps:
            found.append(StepSpan(stop - start, stop, num_rows))
            start = stop
    return tuple(found)


def preview_spans(spans: Sequence[StepSpan], num_previews: int) -> tuple[int, ...]:
    """After which spans to show an image, counted from 0, in order.

    Evenly over what is computed, and none at the end: of k previews the first comes after at most
    1 / (k + 2) of the work, so that it is early even if text and pixels take their time. Few
    steps have fewer places than are asked for.
    """
    work = list(accumulate(span.num_rows for span in spans))
    shown: list[int] = []
    for index in range(num_previews):
        share = (index + 1) / (num_previews + 2)
        at = bisect_right(work, share * work[-1]) - 1 if work else 0
        at = max(at, shown[-1] + 1 if shown else 0)
        if at >= len(spans) - 1:
            break
        shown.append(at)
    return tuple(shown)
