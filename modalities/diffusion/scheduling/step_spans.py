"""Spans of an image's denoising steps: which are taken together, and where previews are shown.

Owns the arithmetic of a `PlannedSteps`. Knows no queue and no time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from triptych.modalities.diffusion.plan import PlannedSteps


class StepSpan(NamedTuple):
    """Steps taken together: skipped ones, and one that computes.

    After it `stop` steps of the whole image are done. `num_rows` guidance branches compute at its
    last step; none do where the image ends in skips.
    """

    num_steps: int
    stop: int
    num_rows: int


def step_spans(planned: PlannedSteps) -> tuple[StepSpan, ...]:
    """All spans of an image, from its first step."""
    found: list[StepSpan] = []
    start = planned.first_step
    for stop in range(planned.first_step + 1, planned.num_steps + 1):
        num_rows = planned.num_rows[stop - 1]
        if num_rows or stop == planned.num_steps:
            found.append(StepSpan(stop - start, stop, num_rows))
            start = stop
    return tuple(found)


def preview_spans(spans: Sequence[StepSpan], num_previews: int) -> tuple[int, ...]:
    """The spans after which to show a preview, counted from 0, in order.

    They are spaced evenly over the computed work, with none at the end: of k previews the first
    comes after at most 1 / (k + 2) of the work, so that it is early even if encoding and decoding
    are slow. Images of few steps have fewer previews than requested.
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
