"""Long work in stages: whose stage runs next, and in what order its answers go out.

Owns the life of jobs whose units are chains of stages (`core.staged_plan`): a sentence of speech
made in one go, a recording that is written down. One stage of a unit runs at a time, so a step is
as long as a stage, whatever the unit. Knows no tensors and no model; when a job's next piece is
due is its pace's business (`staged_pace`).

The policy. The unit that must be begun soonest to be over when it is due goes first, where time
left is what units of its size took so far; jobs that nobody waits for take turns. After
`_MAX_PRESSED` steps that passed over the job that waited longest, that one has a turn: so no job
waits longer than that many steps for each job before it. Units of one job may run ahead of each
other (`units_per_job`), but what they yield goes out in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from triptych.core.errors import OutOfMemory, Overloaded, TriptychError, to_info
from triptych.core.job import Job, JobState, Output
from triptych.core.plan import Plan, StepResult
from triptych.core.staged_plan import (
    Stage,
    StagedPlan,
    StagedRow,
    StagedRowResult,
    StagedStepResult,
    UnitStart,
)
from triptych.schedulers.base import Proposal, SchedulerStats
from triptych.schedulers.staged_pace import JobPace

_MAX_PRESSED = 4
_RELEASE = "release"
_GAIN = 0.2  # of the newest observation in what stages and units are expected to take


@dataclass(slots=True, eq=False)
class _Unit:
    """One unit of a job that is not over, or whose yield waits for the units before it."""

    entry: _StagedJob
    index: int
    stage: Stage
    first_size: float
    is_started: bool = False
    is_in_flight: bool = False
    is_over: bool = False
    is_alone: bool = False
    """Ran out of memory beside others, and is tried by itself from now on."""
    elapsed_s: float = 0.0
    held: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _StagedJob:
    """A job, its open units in order, and when it last had a turn."""

    job: Job
    pace: JobPace
    waiting_since_s: float
    is_paused: bool = False
    is_done: bool = False
    num_opened: int = 0
    units: list[_Unit] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """How much is done at once.

    `max_rows` units share a step at most, and no more of them than `max_size` allows (one may be
    larger). `max_started` have state on the device at a time, `units_per_job` of one job.
    """

    max_rows: int = 1
    max_size: float = math.inf
    max_started: int = 4
    units_per_job: int = 1


@dataclass(frozen=True, slots=True)
class _StagedDraft:
    """The rows of a step; without any it only lets go of what was dropped."""

    rows: tuple[_Unit, ...]
    due_s: float
    version: int
    presses: bool = False
    """Whether it passes over the job that waited longest."""
    not_before_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _StagedStep:
    rows: tuple[_Unit, ...]
    started: frozenset[_Unit]


class StagedScheduler:
    """Implements `schedulers.base.Scheduler` for jobs that are done stage by stage.

    `open_pace` reads a job's request, and raises `RequestError` where it can never run.
    """

    def __init__(
        self,
        *,
        model: str,
        open_pace: Callable[[Job], JobPace],
        max_jobs: int,
        limits: StageLimits,
    ) -> None:
        self._model = model
        self._open_pace = open_pace
        self._max_jobs = max_jobs
        self._limits = limits
        self._gap_s = math.inf
        self._entries: dict[str, _StagedJob] = {}
        self._steps: dict[int, _StagedStep] = {}
        self._dropped: list[str] = []
        self._started: set[_Unit] = set()
        self._num_pressed = 0
        self._version = 0
        self._num_stages = self._num_units = 0
        self._pace_s: dict[str, float] = {}  # seconds per size: of stages by name, of whole units

    def submit(self, job: Job) -> None:
        """Take a job in. Raises what `open_pace` raises, and Overloaded."""
        assert job.job_id not in self._entries, "job ids are unique"
        if len(self._entries) >= self._max_jobs:
            raise Overloaded("The queue is full; try again later.", retry_after_s=1.0)
        pace = self._open_pace(job)
        self._version += 1
        entry = _StagedJob(job, pace, waiting_since_s=job.arrival_s, is_paused=job.is_paused)
        self._entries[job.job_id] = entry
        self._open_units(entry)

    def cancel(self, job_id: str) -> None:
        """End a job with a last payload that says so; an unknown or ended one is ignored."""
        entry = self._entries.get(job_id)
        if entry is not None:
            self._version += 1
            self._end(entry, JobState.CANCELLED, payload=entry.pace.cancelled())

    def set_paused(self, job_id: str, is_paused: bool) -> None:
        """Leave a job out of steps, or let it go on; an unknown or ended one is ignored.

        What it has begun is brought to its end all the same where others wait for the place.
        """
        entry = self._entries.get(job_id)
        if entry is not None:
            self._version += 1
            entry.is_paused = is_paused

    def set_gap(self, gap_s: float) -> None:
        """Units share a step only as far as it fits between the steps of other models."""
        self._gap_s = gap_s

    def propose(self, now_s: float) -> Proposal | None:
        """The next step; none while all depends on steps in flight or on slow readers."""
        draft = self._draft(now_s)
        if draft is None:
            return None
        kind = draft.rows[0].stage.name if draft.rows else _RELEASE
        return Proposal(
            model=self._model,
            kind=kind,
            work={"size": sum(unit.stage.size for unit in draft.rows)},
            due_s=draft.due_s,
            num_rows=len(draft.rows),
            intent=draft,
            not_before_s=draft.not_before_s,
        )

    def book(self, proposal: Proposal, step_id: int, now_s: float) -> Plan | None:
        """Make the plan; chooses anew if anything changed since the proposal."""
        draft = proposal.intent
        assert isinstance(draft, _StagedDraft), "a proposal of this scheduler"
        fresh = draft if draft.version == self._version else self._draft(now_s)
        if fresh is None or fresh.not_before_s > now_s:
            return None
        self._version += 1
        self._num_pressed = self._num_pressed + 1 if fresh.presses else 0
        starts = tuple(unit for unit in fresh.rows if not unit.is_started)
        dropped, self._dropped = tuple(self._dropped), []
        self._steps[step_id] = _StagedStep(fresh.rows, frozenset(starts))
        for unit in fresh.rows:
            self._begin(unit, now_s)
        return StagedPlan(
            step_id=step_id,
            model=self._model,
            kind=fresh.rows[0].stage.name if fresh.rows else _RELEASE,
            rows=tuple(StagedRow(job_id=u.entry.job.job_id, unit=u.index) for u in fresh.rows),
            starts=tuple(_start(unit) for unit in starts),
            dropped=dropped,
        )

    def commit(self, plan: Plan, result: StepResult, now_s: float) -> None:
        """Record what a step yielded and send what is in order."""
        assert isinstance(result, StagedStepResult), "the staged runner's result"
        self._version += 1
        rows = self._steps.pop(plan.step_id).rows
        elapsed_s = result.elapsed_s / max(len(rows), 1)
        for unit, row in zip(rows, result.rows, strict=True):
            unit.is_in_flight = False
            self._num_stages += 1
            self._observe(unit.stage.name, elapsed_s, unit.stage.size)
            unit.elapsed_s += elapsed_s
            if unit.entry.is_done:
                self._started.discard(unit)
            elif row.error is not None:
                self._end(unit.entry, JobState.FAILED, error=row.error)
            else:
                self._accept(unit, row, now_s)

    def fail(self, plan: Plan, error: TriptychError, now_s: float) -> None:
        """End the jobs of a step that raised; after want of memory each is tried alone."""
        self._version += 1
        step = self._steps.pop(plan.step_id)
        is_retried = isinstance(error, OutOfMemory) and len(step.rows) > 1
        for unit in step.rows:
            unit.is_in_flight = False
            if not (unit.entry.is_done or is_retried):  # where it began, it may be under way
                self._end(unit.entry, JobState.FAILED, error=error)
            if unit.entry.is_done or unit in step.started:
                self._started.discard(unit)
                unit.is_started = False
            unit.is_alone = is_retried

    def stats(self) -> SchedulerStats:
        """Counts for metrics."""
        entries = self._entries.values()
        num_running = sum(any(unit.is_started for unit in entry.units) for entry in entries)
        return SchedulerStats(
            num_waiting=len(self._entries) - num_running,
            num_running=num_running,
            gauges={
                "jobs_paused": sum(entry.is_paused for entry in entries),
                "units_started": len(self._started),
            },
            counters={"stages_total": self._num_stages, "units_total": self._num_units},
        )

    def check(self) -> None:
        """Assert that every unit is accounted for."""
        assert len(self._started) <= self._limits.max_started, "more state than there is room for"
        live = {u for e in self._entries.values() for u in e.units if u.is_started}
        in_flight = [unit for step in self._steps.values() for unit in step.rows]
        assert len(in_flight) == len(set(in_flight)), "one stage of a unit at a time"
        assert all(unit.is_in_flight for unit in in_flight)
        assert live <= self._started, "what is started is counted"
        assert self._started - live <= set(in_flight), "only steps in flight outlive their jobs"
        for entry in self._entries.values():
            assert not entry.is_done
            assert 0 < len(entry.units) <= self._limits.units_per_job, "a live job has open units"
            assert not entry.units[0].is_over, "what is over at the head is closed"

    # Choosing.

    def _draft(self, now_s: float) -> _StagedDraft | None:
        able = list(self._candidates())
        ready = [unit for unit in able if unit.entry.pace.not_before_s() <= now_s]
        if ready:
            return self._choice(ready)
        if self._dropped:
            return _StagedDraft((), math.inf, self._version)
        if not able:
            return None
        first = min(able, key=lambda unit: unit.entry.pace.not_before_s())
        not_before_s = first.entry.pace.not_before_s()
        return _StagedDraft((first,), math.inf, self._version, not_before_s=not_before_s)

    def _choice(self, ready: list[_Unit]) -> _StagedDraft:
        patient = min(ready, key=lambda unit: (unit.entry.waiting_since_s, unit.index))
        order = sorted(ready, key=self._urgency)
        first = patient if self._num_pressed >= _MAX_PRESSED else order[0]
        rows = tuple(self._rows(first, order))
        due_s = min(self._due_s(unit) for unit in rows)
        presses = all(unit.entry is not patient.entry for unit in rows)
        return _StagedDraft(rows, due_s, self._version, presses)

    def _rows(self, first: _Unit, order: list[_Unit]) -> Iterator[_Unit]:
        """`first`, and the next in order that can share its step."""
        yield first
        num_rows, size = 1, first.stage.size
        most = self._most(first.stage.name)
        room = self._limits.max_started - len(self._started) - (not first.is_started)
        for unit in order if not first.is_alone else ():
            is_like = unit.stage.name == first.stage.name and not unit.is_alone
            if unit is first or not is_like or not (unit.is_started or room):
                continue
            if num_rows == self._limits.max_rows or size + unit.stage.size > most:
                return
            yield unit
            num_rows += 1
            size += unit.stage.size
            room -= not unit.is_started

    def _most(self, stage: str) -> float:
        """The size of a step: what is allowed, and what fits between those of others."""
        pace_s = self._pace_s.get(stage, 0.0)
        return min(self._limits.max_size, self._gap_s / pace_s if pace_s else math.inf)

    def _candidates(self) -> Iterator[_Unit]:
        """Units that could have a stage now."""
        is_full = len(self._started) >= self._limits.max_started
        for entry in self._entries.values():
            for unit in entry.units:
                can_begin = unit.is_started or not is_full
                is_held_back = entry.is_paused and not (is_full and unit.is_started)
                if can_begin and not is_held_back and not (unit.is_in_flight or unit.is_over):
                    yield unit

    def _urgency(self, unit: _Unit) -> tuple[float, float, int]:
        return self._due_s(unit), unit.entry.waiting_since_s, unit.index

    def _due_s(self, unit: _Unit) -> float:
        """When this stage must be over, if the rest of its unit takes what such units took."""
        if unit is not unit.entry.units[0]:
            return math.inf
        whole_s = self._pace_s.get("", 0.0) * unit.first_size
        stage_s = self._pace_s.get(unit.stage.name, 0.0) * unit.stage.size
        return unit.entry.pace.due_s() - max(0.0, whole_s - unit.elapsed_s - stage_s)

    # Recording.

    def _open_units(self, entry: _StagedJob) -> None:
        while (
            len(entry.units) < self._limits.units_per_job
            and entry.num_opened < entry.pace.num_units
        ):
            stage = entry.pace.first_stage(entry.num_opened)
            entry.units.append(_Unit(entry, entry.num_opened, stage, stage.size))
            entry.num_opened += 1

    def _begin(self, unit: _Unit, now_s: float) -> None:
        """Note that a stage of `unit` is launched."""
        unit.is_in_flight = unit.is_started = True
        self._started.add(unit)
        unit.entry.waiting_since_s = now_s
        unit.entry.job.state = JobState.RUNNING
        unit.entry.job.timings.setdefault("scheduled_s", now_s)

    def _observe(self, name: str, seconds: float, size: float) -> None:
        pace_s = seconds / max(size, 1.0)
        known_s = self._pace_s.setdefault(name, pace_s)
        self._pace_s[name] = known_s + _GAIN * (pace_s - known_s)

    def _accept(self, unit: _Unit, row: StagedRowResult, now_s: float) -> None:
        """Take what a stage yielded; send what nothing before it holds up."""
        if row.payload is not None:
            unit.held.append(row.payload)
        if row.next_stage is not None:
            unit.stage = row.next_stage
        else:
            unit.is_over, unit.is_started = True, False
            self._started.discard(unit)
            self._num_units += 1
            self._observe("", unit.elapsed_s, unit.first_size)
        self._send(unit.entry, now_s)

    def _send(self, entry: _StagedJob, now_s: float) -> None:
        """Everything that is next in order; the last of it ends the job."""
        payloads: list[Any] = []
        while entry.units:
            payloads += entry.units[0].held
            entry.units[0].held = []
            if not entry.units[0].is_over:
                break
            del entry.units[0]
        self._open_units(entry)
        sent = [entry.pace.send(payload, now_s) for payload in payloads]
        if sent:
            entry.job.timings.setdefault("first_output_s", now_s)
        last = sent.pop() if sent and not entry.units else None
        for payload in sent:
            entry.job.sink(Output(job_id=entry.job.job_id, payload=payload))
        if not entry.units:
            self._end(entry, JobState.FINISHED, payload=last)

    def _end(
        self,
        entry: _StagedJob,
        state: JobState,
        *,
        payload: Any = None,
        error: TriptychError | None = None,
    ) -> None:
        """Send the last output; what the job holds is let go of with the next plan."""
        job = entry.job
        entry.is_done = True
        job.state = state
        del self._entries[job.job_id]
        begun = [unit for unit in entry.units if unit.is_started]
        if begun:
            self._dropped.append(job.job_id)
        self._started -= {unit for unit in begun if not unit.is_in_flight}
        info = None if error is None else to_info(error)
        job.sink(Output(job_id=job.job_id, payload=payload, is_final=True, error=info))


def _start(unit: _Unit) -> UnitStart:
    job = unit.entry.job
    return UnitStart(job_id=job.job_id, unit=unit.index, request=job.request)
