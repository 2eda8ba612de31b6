"""The life of a model's jobs, shared by all schedulers: from submission to the last output.

Owns submitting, pausing and cancelling jobs, the versions of steps, the steps in flight, the retry
after an out-of-memory error, outputs and counts. Knows neither what a step computes nor which unit
is next: a scheduler decides that in the methods that begin with an underscore.

- A job is one or more units that run independently: a sample, an image, a segment, a text.
- `_choose_step` is the policy. It chooses among the units that could run, and changes nothing.
- `_book_step` takes the resources of the chosen step and makes its plan. An outdated step is chosen
  again first. A booked step is kept until it has ended.
- `_accept` records the result of one unit in a step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from triptych.core.engine_api.job import Job, JobState, Output
from triptych.core.engine_api.job_report import StepTime
from triptych.core.engine_api.plan import Plan, StepResult
from triptych.core.errors import OutOfMemory, Overloaded, TriptychError, to_info
from triptych.schedulers.base import Proposal, SchedulerStats
from triptych.schedulers.cost import CostModel, JobSeconds
from triptych.schedulers.shares import ServiceShares


class OpenJob(Protocol):
    """The state of a job that was submitted and has not ended."""

    is_paused: bool

    @property
    def job(self) -> Job:
        """The submitted job."""
        ...


@dataclass(slots=True, eq=False)
class BatchedJob:
    """A job that was submitted and has not ended; modalities add their state."""

    job: Job
    is_paused: bool

    @property
    def is_done(self) -> bool:
        """Whether the last output was sent; a step in flight may still compute for the job."""
        return self.job.state.is_final


@dataclass(slots=True, eq=False, kw_only=True)
class Unit:
    """A part of a job that runs independently."""

    num_in_flight: int = 0
    is_alone: bool = False
    """Whether it ran out of memory in a shared step and is retried alone."""

    @property
    def unit(self) -> Unit:
        """The unit itself: it is its own row where a step keeps nothing more of it."""
        return self


class Row(Protocol):
    """A unit's part of a step."""

    @property
    def unit(self) -> Any:
        """The unit that takes part."""
        ...


@dataclass(slots=True, kw_only=True)
class ScheduledStep(Proposal):
    """A step that is proposed and then booked; its results are in the order of `rows`."""

    kind: str
    work: Mapping[str, float] = field(default_factory=dict)
    rows: Sequence[Any] = ()


JobT = TypeVar("JobT", bound=OpenJob)
StepT = TypeVar("StepT", bound=ScheduledStep)
RowT = TypeVar("RowT", bound=Row)


class Batcher(ABC, Generic[JobT, StepT, RowT]):
    """Implements `schedulers.base.Scheduler`; subclasses provide the abstract methods."""

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

    # Calls for requests.

    def submit(self, job: Job) -> None:
        """Accept a job. Raises the errors of `_open`, and `Overloaded`."""
        assert job.job_id not in self._jobs, "job ids are unique"
        opened = self._open(job)
        if self._num_queued() >= self._max_jobs:
            raise Overloaded("The queue is full; try again later.", retry_after_s=1.0)
        self._version += 1
        job.recorder.jobs_ahead = len(self._jobs)
        self._jobs[job.job_id] = opened
        self._shares.join(job.client)
        self._on_submit(opened)

    def cancel(self, job_id: str) -> None:
        """End a job with its cancel payload; an unknown or ended one is ignored."""
        opened = self._jobs.get(job_id)
        if opened is not None:
            self._version += 1
            self._end(opened, JobState.CANCELLED, payload=self._cancel_payload(opened))

    def set_paused(self, job_id: str, is_paused: bool) -> None:
        """Pause or resume a job; an unknown or ended one is ignored."""
        opened = self._jobs.get(job_id)
        if opened is not None and opened.is_paused != is_paused:
            self._version += 1
            opened.is_paused = opened.job.is_paused = is_paused
            self._on_pause(opened)

    def note_change(self) -> None:
        """Make chosen steps outdated: the state they were chosen from has changed."""
        self._version += 1

    def set_step_budget(self, budget_s: float) -> None:
        """Bound the length of a step; infinity where no other model has jobs."""
        self._step_budget_s = budget_s

    # Calls of the loop.

    def propose(self, now_s: float) -> Proposal | None:
        """The next step; `None` while every unit waits for a step in flight or a slow reader."""
        step = self._choose_step(now_s)
        if step is None:
            return None
        step.model, step.version = self._model, self._version
        step.cost_s = self.costs.predict(step.kind, step.work)
        step.is_known = self.costs.is_known(step.kind)
        return step

    def book(self, proposal: Proposal, step_id: int, now_s: float) -> Plan | None:
        """Take the step's resources and make its plan; an outdated step is chosen again."""
        proposed: Any = proposal
        is_fresh = proposal.version == self._version
        step: StepT | None = proposed if is_fresh else self._choose_step(now_s)
        if step is None or step.not_before_s > now_s:
            return None
        self._version += 1
        plan, step.rows = self._book_step(step, step_id, now_s)
        for row in step.rows:
            row.unit.num_in_flight += 1
        self._steps[step_id] = step
        return plan

    def commit(self, plan: Plan, result: StepResult, now_s: float) -> None:
        """Record the results of a step, and send them."""
        assert plan.step_id == next(iter(self._steps)), "steps end in the order they began"
        step = self._close(plan.step_id)
        self._note_step(step, result, now_s)
        self._learn(step, plan.kind, result)
        self._job_seconds.spend(result.elapsed_s)
        self._accept_all(step, result.rows, now_s)
        self._on_step_end(now_s)

    def fail(self, plan: Plan, error: TriptychError, now_s: float) -> None:
        """End the jobs of a step that raised.

        The rows of a step of several that ran out of memory are retried in smaller steps.
        """
        step = self._close(plan.step_id)
        for row in step.rows:
            row.unit.num_in_flight -= 1
        live = [row for row in step.rows if not self._is_void(row)]
        is_large = isinstance(error, OutOfMemory) and len(step.rows) > 1
        if not (is_large and self._retry(step, live, self._rows_in_flight(plan.step_id))):
            for row in live:
                if not self._is_void(row):  # its job may have ended with an earlier row
                    self._fail_row(row, error)
        for row in step.rows:
            self._settle(row)
        self._on_step_end(now_s)

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

    # A scheduler's jobs.

    @abstractmethod
    def _open(self, job: Job) -> JobT:
        """The state of a new job. Raises `RequestError` if it can never run."""

    def _on_submit(self, opened: JobT) -> None:
        """Queue a new job."""

    def _on_pause(self, opened: JobT) -> None:
        """React to a job that was paused or resumed."""

    @abstractmethod
    def _cancel_payload(self, opened: JobT) -> Any:
        """The last payload of a cancelled job, if it has one."""

    @abstractmethod
    def _on_end(self, opened: JobT) -> None:
        """Release the resources of a job that ended, at the latest when its last step ends."""

    def _num_queued(self) -> int:
        return len(self._jobs)

    @abstractmethod
    def _num_waiting(self) -> int:
        """The number of jobs that have not begun."""

    @abstractmethod
    def _gauges(self) -> Mapping[str, float]:
        """Current gauges by name."""

    def _counts_of(self, opened: JobT) -> Mapping[str, int]:
        """Counts of a job that ends, for its account."""
        return {}

    # A scheduler's steps.

    def _note_step(self, step: StepT, result: StepResult, now_s: float) -> None:
        """Add a step that ended to the accounts of its jobs."""
        end_s = now_s if result.ended_s is None else result.ended_s
        parts = list(self._parts_of(step))
        is_shared = any(job is not parts[0][0] for job, _ in parts)
        time = StepTime(end_s - result.elapsed_s, end_s, is_shared)
        for job, stage in parts:
            job.recorder.note(stage, time)

    def _parts_of(self, step: StepT) -> Iterator[tuple[Job, str]]:
        """The jobs that a step computed for, and the stage of each."""
        return ((row.unit.entry.job, step.kind) for row in step.rows)

    @abstractmethod
    def _choose_step(self, now_s: float) -> StepT | None:
        """The policy: the step to run next. Changes nothing."""

    @abstractmethod
    def _book_step(self, step: StepT, step_id: int, now_s: float) -> tuple[Plan, Sequence[RowT]]:
        """Take the step's resources: the plan, and a row for each of its results."""

    def _learn(self, step: StepT, kind: str, result: StepResult) -> None:
        self.costs.observe(kind, step.work, result.elapsed_s)

    def _is_void(self, row: RowT) -> bool:
        """Whether the result of a row is to be dropped."""
        return bool(row.unit.entry.is_done)

    def _accept_all(self, step: StepT, results: Sequence[Any], now_s: float) -> None:
        """Record the results of a step's rows, in order."""
        for row, found in zip(step.rows, results, strict=True):
            row.unit.num_in_flight -= 1
            if not self._is_void(row):
                self._accept(step, row, found, now_s)
            self._settle(row)

    @abstractmethod
    def _accept(self, step: StepT, row: RowT, found: Any, now_s: float) -> None:
        """Record the result of a row."""

    def _retry(self, step: StepT, live: list[RowT], later: Iterable[RowT]) -> bool:
        """Retry rows that ran out of memory; false where that is hopeless.

        Rows of `later` steps in flight depend on results that were not computed.
        """
        for row in live:
            row.unit.is_alone = True
        return True

    def _fail_row(self, row: RowT, error: TriptychError) -> None:
        """End the job of a row that cannot be computed."""
        self._end(row.unit.entry, JobState.FAILED, error=error)

    def _settle(self, row: RowT) -> None:
        """Release what only the ended step of a row still needed."""

    def _on_step_end(self, now_s: float) -> None:
        """React to the end of a step."""

    # Outputs.

    def _send(self, opened: JobT, payload: object) -> None:
        job = opened.job
        job.feed(Output(job_id=job.job_id, payload=payload))

    def _end(
        self,
        opened: JobT,
        state: JobState,
        *,
        payload: object = None,
        error: TriptychError | None = None,
    ) -> None:
        """End a job with its last output."""
        job = opened.job
        job.state = state
        del self._jobs[job.job_id]
        self._shares.leave(job.client)
        self._job_seconds.end()
        job.recorder.count(self._counts_of(opened))
        self._on_end(opened)
        info = None if error is None else to_info(error)
        job.sink(Output(job_id=job.job_id, payload=payload, is_final=True, error=info))

    def _rows_in_flight(self, after: int = -1) -> Iterator[RowT]:
        """Rows of steps in flight, in order: of all steps, or of those `after` one."""
        return (row for number, step in self._steps.items() if number > after for row in step.rows)

    def _close(self, step_id: int) -> StepT:
        self._version += 1
        return self._steps.pop(step_id)
