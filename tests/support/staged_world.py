"""Long work in stages without a network: requests that say how many stages each unit has."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from support.engine_seams import Done, Recorder
from triptych.core.errors import OutOfMemory, TriptychError
from triptych.core.job import Job
from triptych.core.plan import Plan
from triptych.core.staged_plan import Stage, StagedPlan, StagedRowResult, StagedStepResult
from triptych.schedulers.staged import StagedScheduler, StageLimits
from triptych.schedulers.virtual import VirtualClock

STAGE_S = 0.1


@dataclass(frozen=True)
class Request:
    """`units[k]` is the number of stages of unit k; each unit is `sound_s` of speech."""

    units: tuple[int, ...]
    sound_s: float = 1.0
    target_s: float = math.inf
    max_lead_s: float = math.inf
    fails_at: tuple[int, int] | None = None
    tells_all: bool = False
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

    def cancelled(self) -> object:
        return "cancelled"


@dataclass
class StagedFake:
    """A runner whose units are counters. It checks that it is told what a real one must be."""

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
        return Done(StagedStepResult(step_id=plan.step_id, elapsed_s=STAGE_S, rows=rows))

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
        told = (*key, done) if request.tells_all else None
        return StagedRowResult(payload=told, next_stage=Stage("go", 1.0))


class Rig:
    """A scheduler and a runner, with up to two plans in flight, as the engine has."""

    def __init__(
        self, *, depth: int = 1, max_fit: int = 10_000, max_jobs: int = 100, **limits: Any
    ) -> None:
        self.clock = VirtualClock()
        self.scheduler = StagedScheduler(
            model="m", open_pace=Pace, max_jobs=max_jobs, limits=StageLimits(**limits)
        )
        self.runner = StagedFake(max_fit=max_fit)
        self.outputs = Recorder()
        self.jobs: dict[str, Job] = {}
        self.depth = depth
        self.in_flight: deque[tuple[StagedPlan, StagedStepResult | Exception]] = deque()
        self.num_steps = 0

    def submit(self, job_id: str, request: Request) -> None:
        job = Job(
            job_id=job_id,
            model="m",
            request=request,
            sink=self.outputs,
            arrival_s=self.clock(),
        )
        self.jobs[job_id] = job
        self.scheduler.submit(job)

    def launch(self) -> bool:
        proposal = self.scheduler.propose(self.clock())
        assert proposal == self.scheduler.propose(self.clock()), "proposing changes nothing"
        if proposal is None or proposal.not_before_s > self.clock():
            return False
        plan = self.scheduler.book(proposal, self.num_steps, self.clock())
        assert isinstance(plan, StagedPlan)
        self.num_steps += 1
        try:
            result: StagedStepResult | Exception = self.runner.launch(plan).result()
        except Exception as error:
            result = error
        self.in_flight.append((plan, result))
        return True

    def settle(self) -> None:
        plan, result = self.in_flight.popleft()
        self.clock.advance(STAGE_S)
        if isinstance(result, Exception):
            self.scheduler.fail(plan, result, self.clock())
        else:
            self.scheduler.commit(plan, result, self.clock())
        self.scheduler.check()

    def payloads(self, job_id: str) -> list[object]:
        outputs = self.outputs.outputs.get(job_id, [])
        return [output.payload for output in outputs if output.payload is not None]

    def has_ended(self, job_id: str) -> bool:
        return self.outputs.final(job_id) is not None

    def step(self) -> bool:
        """Launch as far as the depth allows, then end the oldest step."""
        while len(self.in_flight) < self.depth and self.launch():
            pass
        if self.in_flight:
            self.settle()
            return True
        return False

    def run(self) -> None:
        while self.step():
            pass


def order_of(plans: Sequence[StagedPlan]) -> list[str]:
    """The job of each step's first row."""
    return [plan.rows[0].job_id for plan in plans if plan.rows]
