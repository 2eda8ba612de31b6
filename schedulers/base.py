"""The protocol between the engine's loop and every modality's scheduler.

Owns `Scheduler`, `Proposal` and the loading of models. Policies live in their own files.

State changes in three kinds of calls only, all made on the loop's thread: `submit`/`cancel`
(requests), `book` (a proposal was picked: take its pages and slots) and `commit`/`fail` (its step
has ended). `propose` changes nothing, so a proposal that is not picked costs nothing.
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
from triptych.schedulers.executors import Post


@dataclass(slots=True, kw_only=True)
class Proposal:
    """The step a scheduler would run next, how urgent it is, and how long it will take.

    Schedulers extend it by their choice, made from their state of that `version`; it is passed back
    to `book`. Once booked it has a `plan`; `started_s` is when the plan reached the device.

    `due_s` is the moment by which the step must end to keep its promise (playback, inter-token
    target), infinity without one. A step that is too early (a frame far ahead of playback) has
    `not_before_s` in the future: the loop proposes again then. `is_known` is false while no step of
    its kind was timed.
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
        """Whether its result is needed by a finite time."""
        return math.isfinite(self.due_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot for metrics: counts of jobs, the scheduler's gauges and counters."""

    num_waiting: int
    num_running: int
    gauges: dict[str, float]
    counters: dict[str, float]


class Scheduler(Protocol):
    """Decides which step one model runs next. Deterministic: same calls, same answers."""

    @property
    def costs(self) -> CostModel:
        """The durations of its steps, learned in `commit`."""
        ...

    def submit(self, job: Job) -> None:
        """Accept a job. Raises `RequestError` if it can never run, `Unavailable` if not now."""
        ...

    def cancel(self, job_id: str) -> None:
        """End a job; its resources are freed as soon as no step in flight uses them."""
        ...

    def set_paused(self, job_id: str, is_paused: bool) -> None:
        """Pause a job (its reader is slow), or resume it."""
        ...

    def set_step_budget(self, budget_s: float) -> None:
        """Bound the length of steps that can be cut; infinity if no other model has jobs."""
        ...

    def propose(self, now_s: float) -> Proposal | None:
        """The step to run next, or `None`. Changes nothing.

        Steps in flight count as done where possible, so that the next one can be planned while they
        run; a scheduler that waits for its step to end misses the next turn.
        """
        ...

    def book(self, proposal: Proposal, step_id: int, now_s: float) -> Plan | None:
        """Take the proposal's resources and make its plan. `None` if nothing is left to run."""
        ...

    def commit(self, plan: Plan, result: StepResult, now_s: float) -> None:
        """Record the result of a step and send it to the jobs' sinks."""
        ...

    def fail(self, plan: Plan, error: TriptychError, now_s: float) -> None:
        """End or retry the jobs of a step that raised, and free their resources."""
        ...

    def stats(self) -> SchedulerStats:
        """Counts for metrics."""
        ...

    def check(self) -> None:
        """Assert that every resource is accounted for."""
        ...


def _connect_nothing(post: Post) -> None:
    """Do nothing: most models have no helper threads."""


def _warm_nothing() -> None:
    """Do nothing: most models are fully prepared once loaded."""


def _attach_nothing(submit: Callable[[Job], None]) -> None:
    """Do nothing: most models run only requests of clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run: its scheduler, its runner, and how to release both.

    `connect(post)` runs once on the loop's thread before any job; `post(call)` schedules a call on
    that thread. `attach(submit)` runs after it; `submit(job)` runs a job of the model itself.
    `warm` starts, on helper threads, the preparations that a first request would wait for.
    `reduced_context` is its context in tokens where the model's own does not fit; 0 elsewhere.
    """

    name: str
    scheduler: Scheduler
    runner: Runner
    close: Callable[[], None]
    connect: Callable[[Post], None] = _connect_nothing
    warm: Callable[[], None] = _warm_nothing
    attach: Callable[[Callable[[Job], None]], None] = _attach_nothing
    reduced_context: int = 0


class ModelLoader(Protocol):
    """Loads one configured model onto the device. Holds nothing before that."""

    name: str

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        """Load (blocking; runs on a loader thread). Calls `report` with progress 0..1.

        Raises `MemoryBudgetExceeded` when the ledger has no room (the engine then evicts an idle
        model and tries again), `ModelTooLarge` when it never will, and `WeightsError` when the
        checkpoint is unusable.
        """
        ...

    def check_size(self) -> None:
        """Raise `ModelTooLarge` if the ledger is known never to have room.

        Reads no weights and takes no memory; called on a loader thread before any load.
        """
        ...
