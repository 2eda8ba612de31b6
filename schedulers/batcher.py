"""The life of a model's jobs, written once: from submission through steps to the last output.

Owns submitting, pausing and cancelling jobs, the version of a step, the steps in flight, the
second try after want of memory, outputs and counts. Knows neither what a step computes nor which
unit is next: a scheduler says that in the methods that begin with an underscore.

- A job is one or more units that run by themselves: a sample, an image, a segment, a text.
- `_choose_step` is the policy. It chooses among the units that could run, and changes nothing.
- `_take` does what was chosen and makes the plan. A step that is out of date is made again first.
  It is kept until its step is over.
- `_accept` takes in what a step yielded of one unit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from triptych.core.engine_api.job import Job, JobState, Output
from triptych.core.engine_api.plan import Plan, StepResult
from triptych.core.errors import OutOfMemory, Overloaded, TriptychError, to_info
from triptych.schedulers.backlog import JobSeconds
from triptych.schedulers.base import Proposal, SchedulerStats
from triptych.schedulers.cost import CostModel
from triptych.schedulers.shares import ServiceShares


class OpenJob(Protocol):
    """What is kept of a job that was submitted and has not ended."""

    is_paused: bool

    @property
    def job(self) -> Job:
        """The job."""
        ...


@dataclass(slots=True, eq=False)
class BatchedJob:
    """A job that was submitted and has not ended, with what its modality keeps of it."""

    job: Job
    is_paused: bool

    @property
    def is_done(self) -> bool:
        """Whether the last output was sent; a step in flight may still compute for it."""
        return self.job.state.is_final


@dataclass(slots=True, eq=False, kw_only=True)
class Unit:
    """A part of a job that runs by itself."""

    num_in_flight: int = 0
    is_alone: bool = False
    """Ran out of memory beside others: it is tried once more, by itself."""

    @property
    def unit(self) -> Unit:
        """A unit is its own row where a step needs to know no more of it."""
        return self


class Row(Protocol):
    """A unit's part of a step."""

    @property
    def unit(self) -> Any:
        """What takes part."""
        ...


@dataclass(slots=True, kw_only=True)
class ScheduledStep(Proposal):
    """A step that could run next, and then one that is booked; results come in order of `rows`."""

    kind: str
    work: Mapping[str, float] = field(default_factory=dict)
    rows: Sequence[Any] = ()


JobT = TypeVar("JobT", bound=OpenJob)
StepT = TypeVar("StepT", bound=ScheduledStep)
RowT = TypeVar("RowT", bound=Row)


class Batcher(ABC, Generic[JobT, StepT, RowT]):
    """Implements `schedulers.base.Scheduler`, but for what the methods below leave open."""

    def __init__(self, *, model: str, max_jobs: int, counters: Iterable[str]) -> None:
        self.costs = CostModel()
        self._model = model
        self._max_jobs = max_jobs
        self._jobs: dict[str, JobT] = {}
        self._steps: dict[int, StepT] = {}
        self._counters: dict[str, float] = dict.fromkeys(counters, 0)
        self._step_budget_s = math.inf
        self._version = 0
        self._job_seconds = JobSeconds()
        self._shares = ServiceShares()

    # What others ask.

    def submit(self, job: Job) -> None:
        """Take a job in. Raises what `_open` raises, and `Overloaded`."""
        assert job.job_id not in self._jobs, "job ids are unique"
        opened = self._open(job)
        if self._num_queued() >= self._max_jobs:
            raise Overloaded("The queue is full; try again later.", retry_after_s=1.0)
        self._version += 1
        self._jobs[job.job_id] = opened
        self._shares.join(job.client)
        self._joined(opened)

    def cancel(self, job_id: str) -> None:
        """End a job with a last payload that says so; an unknown or ended one is ignored."""
        opened = self._jobs.get(job_id)
        if opened is not None:
            self._version += 1
            self._end(opened, JobState.CANCELLED, payload=self._cancelled(opened))

    def set_paused(self, job_id: str, is_paused: bool) -> None:
        """Leave a job out of steps, or let it go on; an unknown or ended one is ignored."""
        opened = self._jobs.get(job_id)
        if opened is not None and opened.is_paused != is_paused:
            self._version += 1
            opened.is_paused = opened.job.is_paused = is_paused
            self._paused(opened)

    def note_change(self) -> None:
        """What a step was made from has changed."""
        self._version += 1

    def set_step_budget(self, budget_s: float) -> None:
        """How long a step may be; infinity where no other model has jobs."""
        self._step_budget_s = budget_s

    # What the loop asks.

    def propose(self, now_s: float) -> Proposal | None:
        """The next step; none while all depends on steps in flight or on slow readers."""
        step = self._choose_step(now_s)
        if step is None:
            return None
        step.model, step.version = self._model, self._version
        step.cost_s = self.costs.predict(step.kind, step.work)
        step.is_known = self.costs.is_known(step.kind)
        return step

    def book(self, proposal: Proposal, step_id: int, now_s: float) -> Plan | None:
        """Take what the step needs and make the plan; chooses again if anything changed since."""
        proposed: Any = proposal
        is_fresh = proposal.version == self._version
        step: StepT | None = proposed if is_fresh else self._choose_step(now_s)
        if step is None or step.not_before_s > now_s:
            return None
        self._version += 1
        plan, step.rows = self._take(step, step_id, now_s)
        for row in step.rows:
            row.unit.num_in_flight += 1
        self._steps[step_id] = step
        return plan

    def commit(self, plan: Plan, result: StepResult, now_s: float) -> None:
        """Record what a step yielded, and send it."""
        assert plan.step_id == next(iter(self._steps)), "steps end in the order they began"
        step = self._close(plan.step_id)
        self._learn(step, plan.kind, result)
        self._job_seconds.spend(result.elapsed_s)
        for row, found in zip(step.rows, result.rows, strict=True):
            row.unit.num_in_flight -= 1
            if not self._is_void(row):
                self._accept(step, row, found, now_s)
            self._settle(row)
        self._committed(now_s)

    def fail(self, plan: Plan, error: TriptychError, now_s: float) -> None:
        """End the jobs of a step that raised.

        Where it ran out of memory with several rows they are tried once more, in smaller steps.
        """
        step = self._close(plan.step_id)
        for row in step.rows:
            row.unit.num_in_flight -= 1
        live = [row for row in step.rows if not self._is_void(row)]
        is_large = isinstance(error, OutOfMemory) and len(step.rows) > 1
        if not (is_large and self._retry(step, live, self._rows_in_flight(plan.step_id))):
            for row in live:
                if not self._is_void(row):  # its job may have ended with a row before it
                    self._give_up(row, error)
        for row in step.rows:
            self._settle(row)
        self._committed(now_s)

    def stats(self) -> SchedulerStats:
        """Counts for metrics."""
        num_waiting = self._num_waiting()
        num_running = len(self._jobs) - num_waiting
        num_paused = sum(opened.is_paused for opened in self._jobs.values())
        seconds = self._job_seconds
        left_s = seconds.left_s(num_waiting=num_waiting, num_running=num_running)
        return SchedulerStats(
            num_waiting=num_waiting,
            num_running=num_running,
            gauges={
                "jobs_paused": num_paused,
                "job_seconds": seconds.mean_s,
                "backlog_seconds": left_s,
                **self._gauges(),
            },
            counters=dict(self._counters),
        )

    @abstractmethod
    def check(self) -> None:
        """Assert that every resource is accounted for."""

    # What a scheduler says of its jobs.

    @abstractmethod
    def _open(self, job: Job) -> JobT:
        """Read a job, and change nothing. Raises `RequestError` where it can never run."""

    def _joined(self, opened: JobT) -> None:
        """A job came."""

    def _paused(self, opened: JobT) -> None:
        """A job's reader has become slow, or goes on."""

    @abstractmethod
    def _cancelled(self, opened: JobT) -> Any:
        """The last payload of a job that is cancelled; `None` for none."""

    @abstractmethod
    def _left(self, opened: JobT) -> None:
        """A job has ended: release what it holds, or note it for when its last step is over."""

    def _num_queued(self) -> int:
        return len(self._jobs)

    @abstractmethod
    def _num_waiting(self) -> int:
        """Jobs that have not begun."""

    @abstractmethod
    def _gauges(self) -> Mapping[str, float]:
        """Current gauges by name."""

    # What a scheduler says of its steps.

    @abstractmethod
    def _choose_step(self, now_s: float) -> StepT | None:
        """The policy: the step to run next. Reads, and changes nothing."""

    @abstractmethod
    def _take(self, step: StepT, step_id: int, now_s: float) -> tuple[Plan, Sequence[RowT]]:
        """Do what was chosen: the plan, and a row for each of its results."""

    def _learn(self, step: StepT, kind: str, result: StepResult) -> None:
        self.costs.observe(kind, step.work, result.elapsed_s)

    def _is_void(self, row: RowT) -> bool:
        """Whether nothing more is wanted of a row that was in flight."""
        return bool(row.unit.entry.is_done)

    @abstractmethod
    def _accept(self, step: StepT, row: RowT, found: Any, now_s: float) -> None:
        """Take in what a row yielded."""

    def _retry(self, step: StepT, live: list[RowT], later: Iterable[RowT]) -> bool:
        """Have rows tried again that ran out of memory; false where that is hopeless.

        What `later` steps in flight have of them follows from what was not computed.
        """
        for row in live:
            row.unit.is_alone = True
        return True

    def _give_up(self, row: RowT, error: TriptychError) -> None:
        """A row cannot be computed."""
        self._end(row.unit.entry, JobState.FAILED, error=error)

    def _settle(self, row: RowT) -> None:
        """A row's step is over: release what only this step still needed."""

    def _committed(self, now_s: float) -> None:
        """A step is over."""

    # Outputs.

    def _send(self, opened: JobT, payload: object) -> None:
        opened.job.sink(Output(job_id=opened.job.job_id, payload=payload))

    def _end(
        self,
        opened: JobT,
        state: JobState,
        *,
        payload: object = None,
        error: TriptychError | None = None,
    ) -> None:
        """Send a job's last output."""
        job = opened.job
        job.state = state
        del self._jobs[job.job_id]
        self._shares.leave(job.client)
        self._job_seconds.end()
        self._left(opened)
        info = None if error is None else to_info(error)
        job.sink(Output(job_id=job.job_id, payload=payload, is_final=True, error=info))

    def _rows_in_flight(self, after: int = -1) -> Iterator[RowT]:
        """What steps in flight have, in order: all of them, or those later than one."""
        return (row for number, step in self._steps.items() if number > after for row in step.rows)

    def _close(self, step_id: int) -> StepT:
        self._version += 1
        return self._steps.pop(step_id)
