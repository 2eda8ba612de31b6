"""The account of one job: how long it waited, why, and where its seconds went.

Owns the account (`JobRecorder`, kept by the engine) and its final form (`JobReport`, sent with the
last output of the job). All times are relative to the arrival of the job, since the clocks of
engine and reader may differ. Knows no modality: stages, waits and counts have names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import msgspec

LOAD = "load"
QUEUE = "queue"
PREEMPTED = "preempted"
SLOW_READER = "slow_reader"
"""Reasons to wait: for its model, for its first step, for pages, and for its reader."""

MAX_SPANS = 64
"""Further spans are merged into the last one of their stage."""
_NEGLIGIBLE_S = 1e-6

BusySeconds = Mapping[tuple[str, str], float]
"""Device seconds of all ended steps, by model and kind."""


class JobSpan(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Successive steps of one stage of a job, such as the chunks of its prompt.

    They took `busy_s` of device time between `start_s` and `end_s`; `num_shared` of them also
    computed for other jobs.
    """

    stage: str
    start_s: float
    end_s: float
    busy_s: float
    num_steps: int = 1
    num_shared: int = 0


class BusyWith(msgspec.Struct, frozen=True, kw_only=True):
    """Device seconds of the steps of one kind that ended while a job waited."""

    model: str
    kind: str
    busy_s: float


class JobReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The account of a job that has ended, `length_s` after `arrival_s` on the engine's clock.

    `first_output_s` is the time until its first output. `waits` are seconds by reason, `behind` is
    the work of the device during the waits for a step. `jobs_ahead` jobs of its model were open at
    its arrival. `sat_out` counts the steps in which it was the next job to begin and could not, by
    what was missing. `skipped` are the denoising steps, by image, that a step cache skipped.
    """

    state: str
    arrival_s: float
    length_s: float
    first_output_s: float | None = None
    jobs_ahead: int = 0
    waits: dict[str, float] = {}
    behind: tuple[BusyWith, ...] = ()
    sat_out: dict[str, int] = {}
    spans: tuple[JobSpan, ...] = ()
    counts: dict[str, int] = {}
    skipped: dict[int, list[int]] = {}


class StepTime(NamedTuple):
    """The time of a step on the engine's clock, and whether it computed for several jobs."""

    start_s: float
    end_s: float
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class _Wait:
    reason: str
    since_s: float
    busy: dict[tuple[str, str], float]


class JobRecorder:
    """Keeps the account of a job. `busy` is the engine's running total, read while it waits."""

    def __init__(self, arrival_s: float, busy: BusySeconds = MappingProxyType({})) -> None:
        self.jobs_ahead = 0
        self._arrival_s = arrival_s
        self._busy = busy
        self._waits: dict[str, float] = {}
        self._behind: dict[tuple[str, str], float] = {}
        self._sat_out: dict[str, int] = {}
        self._spans: list[JobSpan] = []
        self._counts: dict[str, int] = {}
        self._skipped: dict[int, list[int]] = {}
        self._last_step: StepTime | None = None
        self._span: JobSpan | None = None
        self._wait = _Wait(QUEUE, arrival_s, dict(busy))
        self._is_waiting = True
        self._interrupted = ""
        self._is_closed = False

    def wait(self, reason: str, now_s: float) -> None:
        """Begin to wait, which ends a wait for another reason."""
        self.resume(now_s)
        self._wait, self._is_waiting = _Wait(reason, now_s, dict(self._busy)), True

    def resume(self, now_s: float) -> None:
        """End the current wait, if there is one."""
        if not self._is_waiting:
            return
        self._is_waiting = False
        reason, waited_s = self._wait.reason, now_s - self._wait.since_s
        if waited_s > _NEGLIGIBLE_S:
            self._waits[reason] = self._waits.get(reason, 0.0) + waited_s
        if reason != SLOW_READER:
            self._add_busy(self._wait.busy)

    def set_paused(self, is_paused: bool, now_s: float) -> None:
        """Begin or end to wait for a slow reader, which interrupts another wait."""
        if is_paused:
            self._interrupted = self._wait.reason if self._is_waiting else ""
            self.wait(SLOW_READER, now_s)
        elif self._is_waiting and self._wait.reason == SLOW_READER:
            self.resume(now_s)
            if self._interrupted:
                self.wait(self._interrupted, now_s)

    def sit_out(self, missing: str) -> None:
        """Count a step that began without the job, which was next, for want of `missing`."""
        self._sat_out[missing] = self._sat_out.get(missing, 0) + 1

    def note(self, stage: str, step: StepTime) -> None:
        """Add a step that ended, if the account is open; rows of one step count once."""
        if step is self._last_step or self._is_closed:
            return
        self._last_step = step
        start_s, end_s, is_shared = step
        if self._is_waiting and self._wait.reason != SLOW_READER:
            self.resume(start_s)
        span = self._span
        if span is None or span.stage != stage:
            span = self._span = self._span_for(stage, start_s)
        span.end_s = end_s
        span.busy_s += end_s - start_s
        span.num_steps += 1
        span.num_shared += is_shared

    def count(self, counts: Mapping[str, int]) -> None:
        """Set counts of the job by name."""
        self._counts.update(counts)

    def skip(self, image: int, steps: Iterable[int]) -> None:
        """Set the denoising steps of an image that a step cache skipped."""
        self._skipped[image] = list(steps)

    def report(self, state: str, now_s: float, first_output_s: float | None = None) -> JobReport:
        """Close the account. `first_output_s` is on the engine's clock."""
        self.resume(now_s)
        self._is_closed = True
        behind = sorted(self._behind.items(), key=lambda item: -item[1])
        for span in self._spans:  # their times were the clock's
            span.start_s -= self._arrival_s
            span.end_s -= self._arrival_s
        return JobReport(
            state=state,
            arrival_s=self._arrival_s,
            length_s=now_s - self._arrival_s,
            first_output_s=None if first_output_s is None else first_output_s - self._arrival_s,
            jobs_ahead=self.jobs_ahead,
            waits=self._waits,
            behind=tuple(BusyWith(model=m, kind=k, busy_s=s) for (m, k), s in behind),
            sat_out=self._sat_out,
            spans=tuple(self._spans),
            counts=self._counts,
            skipped=self._skipped,
        )

    def _span_for(self, stage: str, start_s: float) -> JobSpan:
        """A new span, or the last one of its stage where there are too many."""
        if len(self._spans) >= MAX_SPANS:
            for span in reversed(self._spans):
                if span.stage == stage:
                    return span
        span = JobSpan(stage=stage, start_s=start_s, end_s=start_s, busy_s=0.0, num_steps=0)
        self._spans.append(span)
        return span

    def _add_busy(self, before: BusySeconds) -> None:
        for key, seconds in self._busy.items():
            grown_s = seconds - before.get(key, 0.0)
            if grown_s > _NEGLIGIBLE_S:
                self._behind[key] = self._behind.get(key, 0.0) + grown_s
