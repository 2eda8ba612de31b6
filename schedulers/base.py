"""What the loop asks of every modality's scheduler.

Owns the protocol and the proposal. Policies live in their own files.

State changes in three calls only, all made by the loop on its own thread: `submit`/`cancel` (the
outside world), `book` (a proposal was chosen: take its pages and slots) and `commit`/`fail` (its
step is over). `propose` reads and never writes, so a proposal that loses its turn costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from triptych.core.engine_api.job import Job
from triptych.core.engine_api.plan import Plan, Runner, StepResult
from triptych.core.errors import TriptychError
from triptych.schedulers.cost import CostModel


@dataclass(slots=True, kw_only=True)
class Proposal:
    """The step a scheduler would run next, how urgent it is, and how long it will take.

    Schedulers extend it by what they chose, from their state of that `version`: it comes back to
    `book`. Once booked it has a `plan`; `started_s` is when that came to the device.

    `due_s` is the moment the step must be finished to keep its promise (playback, inter-token
    target), infinity where there is none. A step whose time has not come (a frame far ahead of
    playback) has `not_before_s` in the future: the loop asks again then. `is_known` is false for a
    kind of which no step was timed.
    """

    model: str = ""
    due_s: float = math.inf
    cost_s: float = 0.0
    is_known: bool = True
    not_before_s: float = 0.0
    version: int = 0
    plan: Plan | None = None
    started_s: float = 0.0

    @property
    def has_deadline(self) -> bool:
        """Whether its result is needed by a certain time."""
        return math.isfinite(self.due_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot for metrics and the model manager: counts of jobs, the scheduler's gauges."""

    num_waiting: int
    num_running: int
    gauges: dict[str, float]
    counters: dict[str, float]


class Scheduler(Protocol):
    """Decides what one model runs next. Deterministic: same calls, same answers.

    `costs` is what it has learned of its steps' seconds, in `commit`.
    """

    @property
    def costs(self) -> CostModel:
        """How long its steps take."""
        ...

    def submit(self, job: Job) -> None:
        """Take a job in. Raises `RequestError` or `Unavailable` if it can never or not now run."""
        ...

    def cancel(self, job_id: str) -> None:
        """End a job; its resources are freed as soon as no step in flight uses them."""
        ...

    def set_paused(self, job_id: str, is_paused: bool) -> None:
        """Hold a job back (its reader is slow), or let it go on."""
        ...

    def set_step_budget(self, budget_s: float) -> None:
        """How long a step may be, where it can be made shorter; infinity if no other has jobs."""
        ...

    def propose(self, now_s: float) -> Proposal | None:
        """The step to run next, or `None`. Reads state, changes nothing.

        Steps in flight count as done where that is possible, so that the next one can be made
        while they run; a scheduler that waits for its step to end loses the next turn.
        """
        ...

    def book(self, proposal: Proposal, step_id: int, now_s: float) -> Plan | None:
        """Take what the proposal needs and make it concrete. `None` if nothing is left of it."""
        ...

    def commit(self, plan: Plan, result: StepResult, now_s: float) -> None:
        """Record what came of a step and send it to the jobs' sinks."""
        ...

    def fail(self, plan: Plan, error: TriptychError, now_s: float) -> None:
        """A step raised: end (or retry) its jobs and free what they hold."""
        ...

    def stats(self) -> SchedulerStats:
        """Counts for metrics."""
        ...

    def check(self) -> None:
        """Assert that every resource is accounted for."""
        ...


def _needs_no_way(post: Callable[[Callable[[], None]], None]) -> None:
    """Most models have no threads of their own."""


def _has_nothing_to_warm() -> None:
    """Most models have what they need once they are loaded."""


def _has_no_jobs_of_its_own(submit: Callable[[Job], None]) -> None:
    """Most models run what clients ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run: its policy, its device work, and how to release both.

    `connect` is told, on the loop's thread and before any job, how other threads have a call made
    there. `warm` begins, on threads of its own, what a first request of some kind would wait for.
    `attach` is told, after `connect`, how the model runs jobs of its own, on the loop's thread.
    """

    name: str
    scheduler: Scheduler
    runner: Runner
    close: Callable[[], None]
    connect: Callable[[Callable[[Callable[[], None]], None]], None] = _needs_no_way
    warm: Callable[[], None] = _has_nothing_to_warm
    attach: Callable[[Callable[[Job], None]], None] = _has_no_jobs_of_its_own


class ModelLoader(Protocol):
    """Knows how to bring one configured model onto the device. Holds nothing until asked."""

    name: str

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        """Load (blocking; runs on a loader thread). Calls `report` with progress 0..1.

        Raises `MemoryBudgetExceeded` when the ledger has no room (the engine then evicts an idle
        model and tries again), `ModelTooLarge` when it never has, and `WeightsError` when the
        checkpoint is unfit.
        """
        ...

    def check_size(self) -> None:
        """Raise `ModelTooLarge` if the ledger can never have room, as far as that is known.

        Reads no weights and takes no memory; called on a loader thread before any load.
        """
        ...
