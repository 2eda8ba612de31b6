"""The steps that ran on the device recently, for clients that watch them.

Owns the steps since the last report: their bound, the merging of short ones, when a report is due.
Records nothing until switched on. Knows nothing of its readers.
"""

from __future__ import annotations

import math
from collections import deque

from triptych.core.engine_api.reports import RunningStep, StepRecord, StepReport

REPORT_S = 0.25
"""The least time between two reports."""
SHORT_S = 0.005
MERGE_S = 0.05
"""Steps shorter than `SHORT_S` are merged with those of their kind that begin within `MERGE_S`."""
MAX_SPANS = 4096


class StepLog:
    """The steps since the last report, recorded while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self._spans: deque[StepRecord] = deque()
        self._latest: dict[tuple[str, str], StepRecord] = {}
        self._num_dropped = 0
        self._next_s = -math.inf
        self._was_running = False

    def switch(self, is_on: bool) -> None:
        """Start recording steps, or stop and forget them."""
        self._clear()
        self.is_on = is_on

    def note(self, step: StepRecord) -> None:
        """Record a step that ended. Later steps may be merged into it until it is reported."""
        key = step.model, step.kind
        latest = self._latest.get(key)
        if latest is not None and _are_one(latest, step):
            _merge(latest, step)
            return
        self._spans.append(step)
        self._latest[key] = step
        if len(self._spans) > MAX_SPANS:
            self._num_dropped += self._spans.popleft().num_steps
            self._latest.clear()  # no step may be merged into a dropped one

    def due_s(self, *, is_running: bool) -> float:
        """When the next report is due; infinity where there is nothing to report."""
        has_news = self._spans or is_running or self._was_running
        return self._next_s if has_news else math.inf

    def report(self, running: RunningStep | None, now_s: float) -> StepReport:
        """The report of the steps since the last one."""
        spans, num_dropped = tuple(self._spans), self._num_dropped
        self._clear()
        self._next_s = now_s + REPORT_S
        self._was_running = running is not None
        return StepReport(steps=spans, running=running, num_dropped=num_dropped)

    def _clear(self) -> None:
        self._spans.clear()
        self._latest.clear()
        self._num_dropped = 0


def _are_one(span: StepRecord, step: StepRecord) -> bool:
    """Whether `step` is merged into `span`, one step or several merged ones."""
    are_short = step.busy_s < SHORT_S and span.busy_s < SHORT_S * span.num_steps
    are_near = step.start_s - span.start_s < MERGE_S
    return are_short and are_near and not (step.is_failed or span.is_failed)


def _merge(span: StepRecord, step: StepRecord) -> None:
    span.length_s = step.start_s + step.length_s - span.start_s
    span.busy_s += step.busy_s
    span.num_rows += step.num_rows
    span.num_steps += step.num_steps
