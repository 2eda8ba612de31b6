"""Long work in stages without a network: requests that say how many stages each unit has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from support.driver import SchedulerDriver
from support.engine_seams import Done
from triptych.core.engine_api.job import Job
from triptych.core.engine_api.plan import Plan, StepResult
from triptych.core.engine_api.staged_plan import Stage, StagedPlan, StagedRowResult
from triptych.core.errors import OutOfMemory, TriptychError
from triptych.schedulers.staged import StagedScheduler, StageLimits

STAGE_S = 0.1


@dataclass(frozen=True)
class Request:
    """`units[k]` is the number of stages of unit k; each unit is `sound_s` of speech."""

    units: tuple[int, ...]
    sound_s: float = 1.0
    target_s: float = math.inf
    max_lead_s: float = math.inf
    fails_at: tuple[int, int] | None = None
    reports_all: bool = False
    """Whether every stage yields something, not only a unit's last."""


class Pace:
    """Plays one unit after the other, as a listener does."""

    def __init__(self, job: Job) -> None:
        self.request: Request = job.request
        self.due = job.arrival_s + self.request.target_s
        self.has_begun = False
        self.sent: list[object] = []

    @property
    def num_units(self) -> int:
        return len(self.request.units)

    def first_stage(self, unit: int) -> Stage:
        return Stage("begin", self.request.units[unit])

    def due_s(self) -> float:
        return self.due

    def not_before_s(self) -> float:
        return max(0.0, self.due - self.request.max_lead_s) if self.has_begun else 0.0

    def send(self, payload: object, now_s: float) -> object:
        if math.isfinite(self.due):
            self.due = (max(self.due, now_s) if self.has_begun else now_s) + self.request.sound_s
            self.has_begun = True
        self.sent.append(payload)
        return payload

    def cancel_payload(self) -> object:
        return "cancelled"


@dataclass
class StagedFake:
    """A runner whose units are counters. It checks its plans as a real one needs them."""

    max_fit: int = 10_000
    under_way: dict[tuple[str, int], tuple[Request, int]] = field(default_factory=dict)
    log: list[StagedPlan] = field(default_factory=list)

    def launch(self, plan: Plan) -> Done:
        assert isinstance(plan, StagedPlan)
        self.log.append(plan)
        for job_id in plan.dropped:
            for key in [key for key in self.under_way if key[0] == job_id]:
                del self.under_way[key]
        if len(plan.rows) > self.max_fit:
            raise OutOfMemory("too many")
        for start in plan.starts:
            assert (start.job_id, start.unit) not in self.under_way, "a unit begins once"
            self.under_way[start.job_id, start.unit] = (start.request, 0)
        assert plan.rows or plan.dropped, "a plan does something"
        rows = tuple(self._advance((row.job_id, row.unit)) for row in plan.rows)
        return Done(StepResult(elapsed_s=STAGE_S, rows=rows))

    def close(self) -> None:
        self.under_way.clear()

    def _advance(self, key: tuple[str, int]) -> StagedRowResult:
        request, done = self.under_way[key]
        done += 1
        if request.fails_at == (key[1], done):
            del self.under_way[key]
            return StagedRowResult(error=TriptychError("this one is broken"))
        if done == request.units[key[1]]:
            del self.under_way[key]
            return StagedRowResult(payload=key)
        self.under_way[key] = (request, done)
        payload = (*key, done) if request.reports_all else None
        return StagedRowResult(payload=payload, next_stage=Stage("go", 1.0))


class Rig(SchedulerDriver):
    """The scheduler of stages, and units that are counters. A listener's time does not pass."""

    has_patience = False
    has_equal_steps = True

    def __init__(
        self, *, depth: int = 1, max_fit: int = 10_000, max_jobs: int = 100, **limits: Any
    ) -> None:
        scheduler = StagedScheduler(
            model="m", open_pace=Pace, max_jobs=max_jobs, limits=StageLimits(**limits)
        )
        runner = StagedFake(max_fit=max_fit)
        super().__init__(scheduler, runner, model="m", depth=depth, now_s=1000.0)

    def over(self, plan: Plan, outcome: StepResult | TriptychError) -> None:
        self.clock.advance(STAGE_S)

    def settled(self, plan: Plan) -> None:
        self.scheduler.check()


def order_of(plans: Sequence[StagedPlan]) -> list[str]:
    """The job of each step's first row."""
    return [plan.rows[0].job_id for plan in plans if plan.rows]
