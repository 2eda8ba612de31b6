"""Long work in stages: which stage runs next, and in what order the results are sent.

Owns the policy and the order of jobs whose units are chains of stages
(`core.engine_api.staged_plan`): a sentence that is synthesized as a whole, a recording that is
transcribed. One stage of a unit runs at a time, so a step is as long as a stage, whatever the unit.
Knows no tensors and no model; a job's `JobPace` gives its deadlines.

The policy:

1. The unit that must start soonest to be over when it is due goes first; the time it needs is
   predicted from units of its size (`_due_s`).
2. Where several clients have work, of units that are late already, and of those that are never due,
   the client that received the least goes first. Its jobs take turns (`_urgency`).
3. After `_MAX_OVERTAKES` steps that overtook the job that waited longest, that job has a turn: no
   job waits longer than that many steps for each job before it (`_choose`).
4. Units of one job may run ahead of each other (`units_per_job`); their results are sent in order
   (`_send_ready`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from triptych.core.engine_api.job import Job, JobState
from triptych.core.engine_api.plan import StepResult
from triptych.core.engine_api.staged_plan import (
    Stage,
    StagedPlan,
    StagedRow,
    StagedRowResult,
    UnitStart,
)
from triptych.schedulers.batcher import BatchedJob, Batcher, ScheduledStep, Unit

_MAX_OVERTAKES = 4
_RELEASE = "release"
_WHOLE = "unit"  # the work of a unit over all its stages, by the size of the first


class JobPace:
    """One job's size and deadlines, read from its request: here one unit with one deadline."""

    def __init__(
        self, first_stage: Stage, due_s: float = math.inf, cancel_payload: Any = None
    ) -> None:
        self._first_stage = first_stage
        self._due_s = due_s
        self._cancel_payload = cancel_payload

    @property
    def num_units(self) -> int:
        """How many units the job has; at least one."""
        return 1

    def first_stage(self, unit: int) -> Stage:
        """The first stage of a unit."""
        return self._first_stage

    def due_s(self) -> float:
        """When the next unit to be sent must be over; infinity for no deadline."""
        return self._due_s

    def not_before_s(self) -> float:
        """The earliest time to continue; 0 for at once."""
        return 0.0

    def send(self, payload: Any, now_s: float) -> Any:
        """Record that `payload` is sent now; returns it with the job's running counts."""
        return payload

    def cancel_payload(self) -> Any:
        """The last payload of a cancelled job, if it has one."""
        return self._cancel_payload


@dataclass(slots=True, eq=False, kw_only=True)
class _StagedUnit(Unit):
    """One unit of a job, until its results are sent after those of the units before it."""

    entry: _StagedJob
    index: int
    stage: Stage
    first_size: float
    is_started: bool = False
    is_over: bool = False
    num_stages: int = 0
    elapsed_s: float = 0.0
    yielded: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _StagedJob(BatchedJob):
    """A job with its open units in order."""

    pace: JobPace
    waiting_since_s: float
    num_opened: int = 0
    units: list[_StagedUnit] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """Bounds on concurrent work.

    At most `max_rows` units share a step, of `max_size` together (a single one may be larger). At
    most `max_started` units have state on the device at a time, `units_per_job` of one job.
    """

    max_rows: int = 1
    max_size: float = math.inf
    max_started: int = 4
    units_per_job: int = 1


@dataclass(slots=True, kw_only=True)
class _StagedStep(ScheduledStep):
    """Units and their stage; without units the step only releases dropped jobs."""

    rows: tuple[_StagedUnit, ...] = ()
    overtakes_oldest: bool = False
    """Whether it overtakes the job that waited longest."""


class StagedScheduler(Batcher[_StagedJob, _StagedStep, _StagedUnit]):
    """Schedules jobs that run stage by stage.

    `open_pace` reads a job's request, and raises `RequestError` if it can never run.
    """

    def __init__(
        self,
        *,
        model: str,
        open_pace: Callable[[Job], JobPace],
        max_jobs: int,
        limits: StageLimits,
    ) -> None:
        super().__init__(model=model, max_jobs=max_jobs, counters=("stages_total", "units_total"))
        self._open_pace = open_pace
        self._limits = limits
        self._dropped: list[str] = []
        self._started: set[_StagedUnit] = set()
        self._num_overtakes = 0

    def check(self) -> None:
        """Assert that every unit is accounted for."""
        assert len(self._started) <= self._limits.max_started, "more state than there is room for"
        live = {u for e in self._jobs.values() for u in e.units if u.is_started}
        in_flight = list(self._rows_in_flight())
        assert len(in_flight) == len(set(in_flight)), "one stage of a unit at a time"
        assert all(unit.num_in_flight == 1 for unit in in_flight)
        assert live <= self._started, "started units are counted"
        assert self._started - live <= set(in_flight), "only steps in flight outlive their jobs"
        for entry in self._jobs.values():
            assert not entry.is_done
            assert 0 < len(entry.units) <= self._limits.units_per_job, "a live job has open units"
            assert not entry.units[0].is_over, "finished units at the head are closed"

    # Choosing.

    def _choose_step(self, now_s: float) -> _StagedStep | None:
        able = list(self._candidates())
        if ready := [unit for unit in able if unit.entry.pace.not_before_s() <= now_s]:
            return self._choose(ready, now_s)
        if self._dropped:
            return _StagedStep(kind=_RELEASE)
        if not able:
            return None
        first = min(able, key=lambda unit: unit.entry.pace.not_before_s())
        name, not_before_s = first.stage.name, first.entry.pace.not_before_s()
        return _StagedStep(kind=name, rows=(first,), not_before_s=not_before_s)

    def _choose(self, ready: list[_StagedUnit], now_s: float) -> _StagedStep:
        oldest = min(ready, key=lambda unit: (unit.entry.waiting_since_s, unit.index))
        order = sorted(ready, key=lambda unit: self._urgency(unit, now_s))
        first = oldest if self._num_overtakes >= _MAX_OVERTAKES else order[0]
        rows = tuple(self._rows(first, order))
        name = first.stage.name
        return _StagedStep(
            kind=name,
            work={"size": sum(unit.stage.size for unit in rows)},
            rows=rows,
            due_s=min(self._due_s(unit) for unit in rows),
            overtakes_oldest=all(unit.entry is not oldest.entry for unit in rows),
        )

    def _rows(self, first: _StagedUnit, order: list[_StagedUnit]) -> Iterator[_StagedUnit]:
        """`first`, and the next units in order that can share its step."""
        yield first
        num_rows, size, stage = 1, first.stage.size, first.stage.name
        room = self._limits.max_started - len(self._started) - (not first.is_started)
        for unit in order if not first.is_alone else ():
            is_like = unit.stage.name == stage and not unit.is_alone
            if unit is first or not is_like or not (unit.is_started or room):
                continue
            size += unit.stage.size
            is_large = size > self._limits.max_size or num_rows == self._limits.max_rows
            if is_large or self._is_long(stage, size):
                return
            yield unit
            num_rows += 1
            room -= not unit.is_started

    def _is_long(self, stage: str, size: float) -> bool:
        """Whether such work is known to exceed the step budget."""
        return self._took_s(stage, size) > self._step_budget_s

    def _took_s(self, kind: str, size: float) -> float:
        """The seconds that such work takes; 0 while unknown."""
        work = {"size": size}
        return self.costs.predict(kind, work) if self.costs.is_timed(kind, work) else 0.0

    def _candidates(self) -> Iterator[_StagedUnit]:
        """Units that could run a stage now.

        Started units of a paused job run to their end while other jobs wait for their place.
        """
        is_full = len(self._started) >= self._limits.max_started
        for entry in self._jobs.values():
            for unit in entry.units:
                can_begin = unit.is_started or not is_full
                is_held_back = entry.is_paused and not (is_full and unit.is_started)
                if can_begin and not is_held_back and not (unit.num_in_flight or unit.is_over):
                    yield unit

    def _urgency(self, unit: _StagedUnit, now_s: float) -> tuple[float, float, float, int]:
        due_s, received = self._due_s(unit), 0.0
        if self._shares.is_contended:
            due_s, received = max(due_s, now_s), self._shares.service_of(unit.entry.job.client)
        return due_s, received, unit.entry.waiting_since_s, unit.index

    def _due_s(self, unit: _StagedUnit) -> float:
        """When this stage must be over, given the time that such units take."""
        if unit is not unit.entry.units[0]:
            return math.inf
        whole_s = self._took_s(_WHOLE, unit.first_size)
        left_s = whole_s - unit.elapsed_s - self._took_s(unit.stage.name, unit.stage.size)
        return unit.entry.pace.due_s() - max(0.0, left_s)

    # Booking and recording.

    def _open(self, job: Job) -> _StagedJob:
        return _StagedJob(job, job.is_paused, self._open_pace(job), job.arrival_s)

    def _on_submit(self, opened: _StagedJob) -> None:
        self._open_units(opened)

    def _open_units(self, opened: _StagedJob) -> None:
        """Open the next units of a job, up to `units_per_job`."""
        pace, units = opened.pace, opened.units
        while len(units) < self._limits.units_per_job and opened.num_opened < pace.num_units:
            index, stage = opened.num_opened, pace.first_stage(opened.num_opened)
            units.append(_StagedUnit(entry=opened, index=index, stage=stage, first_size=stage.size))
            opened.num_opened += 1

    def _cancel_payload(self, opened: _StagedJob) -> Any:
        return opened.pace.cancel_payload()

    def _book_step(
        self, step: _StagedStep, step_id: int, now_s: float
    ) -> tuple[StagedPlan, tuple[_StagedUnit, ...]]:
        self._num_overtakes = self._num_overtakes + 1 if step.overtakes_oldest else 0
        starts = tuple(unit for unit in step.rows if not unit.is_started)
        dropped, self._dropped = tuple(self._dropped), []
        for unit in step.rows:
            unit.is_started = True
            self._shares.charge(unit.entry.job.client, max(unit.stage.size, 1.0))
            unit.entry.waiting_since_s = now_s
            unit.entry.job.state = JobState.RUNNING
            unit.entry.job.timings.setdefault("scheduled_s", now_s)
        self._started.update(starts)
        plan = StagedPlan(
            step_id=step_id,
            model=self._model,
            kind=step.kind,
            rows=tuple(StagedRow(job_id=u.entry.job.job_id, unit=u.index) for u in step.rows),
            starts=tuple(
                UnitStart(job_id=u.entry.job.job_id, unit=u.index, request=u.entry.job.request)
                for u in starts
            ),
            dropped=dropped,
        )
        return plan, step.rows

    def _learn(self, step: _StagedStep, kind: str, result: StepResult) -> None:
        super()._learn(step, kind, result)
        self._counters["stages_total"] += len(step.rows)
        for unit in step.rows:
            unit.num_stages += 1
            unit.elapsed_s += result.elapsed_s / len(step.rows)

    def _accept(
        self,
        step: _StagedStep,
        row: _StagedUnit,
        found: StagedRowResult,
        now_s: float,
    ) -> None:
        """Record the result of a stage; send results that are next in order."""
        if found.error is not None:
            self._end(row.entry, JobState.FAILED, error=found.error)
            return
        if found.payload is not None:
            row.yielded.append(found.payload)
        if found.next_stage is not None:
            row.stage = found.next_stage
        else:
            row.is_over, row.is_started = True, False
            self._started.discard(row)
            self._counters["units_total"] += 1
            self.costs.observe(_WHOLE, {"size": row.first_size}, row.elapsed_s)
        self._send_ready(row.entry, now_s)

    def _send_ready(self, entry: _StagedJob, now_s: float) -> None:
        """Send all results that are next in order; the last one ends the job."""
        payloads: list[Any] = []
        while entry.units:
            payloads += entry.units[0].yielded
            entry.units[0].yielded = []
            if not entry.units[0].is_over:
                break
            del entry.units[0]
        self._open_units(entry)
        sent = [entry.pace.send(payload, now_s) for payload in payloads]
        if sent:
            entry.job.timings.setdefault("first_output_s", now_s)
        last = sent.pop() if sent and not entry.units else None
        for payload in sent:
            self._send(entry, payload)
        if not entry.units:
            self._end(entry, JobState.FINISHED, payload=last)

    def _retry(
        self, step: _StagedStep, live: list[_StagedUnit], later: Iterable[_StagedUnit]
    ) -> bool:
        for unit in live:
            if not unit.num_stages:  # it starts again
                unit.is_started = False
                self._started.discard(unit)
        return super()._retry(step, live, later)

    def _counts_of(self, opened: _StagedJob) -> Mapping[str, int]:
        num_over = opened.num_opened - len(opened.units)
        return {"units": opened.pace.num_units, "finished_units": num_over}

    def _on_end(self, opened: _StagedJob) -> None:
        begun = [unit for unit in opened.units if unit.is_started]
        if begun:
            self._dropped.append(opened.job.job_id)
        self._started -= {unit for unit in begun if not unit.num_in_flight}

    def _settle(self, row: _StagedUnit) -> None:
        if row.entry.is_done:
            self._started.discard(row)

    def _num_waiting(self) -> int:
        running = (any(unit.is_started for unit in e.units) for e in self._jobs.values())
        return len(self._jobs) - sum(running)

    def _gauges(self) -> dict[str, float]:
        return {"units_started": len(self._started)}
