"""The engine's loop by hand: a scheduler, its runner, some plans in flight, virtual time."""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from typing import Any, ClassVar

from support.engine_seams import Recorder
from support.virtual import VirtualClock
from triptych.core.engine_api.job import Job
from triptych.core.engine_api.plan import Plan, StepResult
from triptych.core.errors import TriptychError
from triptych.schedulers.base import Proposal


class SchedulerDriver:
    """Drives any scheduler as the engine does, a call at a time or until nothing is left to do.

    Up to `depth` plans are in flight; the outcome of one is known when it is launched, and the
    scheduler learns it when the plan ends. A subclass may say how a plan is launched and how long
    it takes, and look on at every point.
    """

    look_s: ClassVar[float] = 0.0
    """What a look for work takes."""
    has_patience: ClassVar[bool] = True
    """Whether time passes until a step may begin, where nothing else is to be done."""
    has_equal_steps: ClassVar[bool] = False
    """Whether the steps of equal proposals are equal."""
    refusals: ClassVar[tuple[type[TriptychError], ...]] = ()
    """Errors of a submission that are returned, not raised."""

    def __init__(
        self, scheduler: Any, runner: Any, *, model: str, depth: int = 1, now_s: float = 0.0
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.model_name = model
        self.depth = depth
        self.clock = VirtualClock(now_s)
        self.outputs = Recorder()
        self.requests: dict[str, Any] = {}
        self.jobs: dict[str, Job] = {}
        self.in_flight: deque[tuple[Plan, StepResult | TriptychError]] = deque()
        self.num_steps = 0

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self.clock.now_s = now_s

    def submit(
        self, job_id: str, request: Any, *, deadline_s: float | None = None, client: str = ""
    ) -> Job | TriptychError:
        """Submit a job, or return why not."""
        job = Job(
            job_id=job_id,
            model=self.model_name,
            request=request,
            client=client,
            sink=self.outputs,
            arrival_s=self.now_s,
            limit_s=None if deadline_s is None else deadline_s - self.now_s,
        )
        try:
            self.scheduler.submit(job)
        except self.refusals as error:
            return error
        self.requests[job_id], self.jobs[job_id] = request, job
        return job

    def book(self) -> Plan | None:
        """Propose, book and launch one plan, if there is one and depth allows."""
        if len(self.in_flight) >= self.depth:
            return None
        self.clock.advance(self.look_s)
        proposal = self._propose()
        plan = self.take(proposal) if proposal is not None else None
        if proposal is None or plan is None:
            return None
        assert plan.kind == proposal.kind
        self.num_steps += 1
        self.in_flight.append((plan, self.launch(plan)))
        return plan

    def _propose(self) -> Any:
        """What may begin now."""
        proposal: Proposal | None = self.scheduler.propose(self.now_s)
        again = self.scheduler.propose(self.now_s)
        assert self._content(proposal) == self._content(again), "proposing changes nothing"
        while proposal is not None and proposal.not_before_s > self.now_s:
            if self.in_flight or not self.has_patience:
                return None
            self.now_s = proposal.not_before_s  # by then it may have become later still
            proposal = self.scheduler.propose(self.now_s)
            assert proposal is not None, "what was to come has gone"
        return proposal

    def _content(self, proposal: Proposal | None) -> Any:
        if proposal is None or self.has_equal_steps:
            return proposal
        return [getattr(proposal, field.name) for field in fields(Proposal)]

    def take(self, proposal: Proposal) -> Plan | None:
        """Book a proposal."""
        plan: Plan | None = self.scheduler.book(proposal, self.num_steps, self.now_s)
        return plan

    def launch(self, plan: Plan) -> StepResult | TriptychError:
        """What comes of a plan."""
        try:
            result: StepResult = self.runner.launch(plan).result()
        except TriptychError as error:
            return error
        return result

    def commit(self) -> bool:
        """End the oldest plan in flight."""
        if not self.in_flight:
            return False
        plan, outcome = self.in_flight.popleft()
        self.over(plan, outcome)
        if isinstance(outcome, TriptychError):
            self.scheduler.fail(plan, outcome, self.now_s)
        else:
            self.scheduler.commit(plan, outcome, self.now_s)
        self.settled(plan)
        return True

    def over(self, plan: Plan, outcome: StepResult | TriptychError) -> None:
        """The device is done with a plan; the scheduler does not know yet."""

    def settled(self, plan: Plan) -> None:
        """The scheduler knows what came of a plan."""

    def fail(self, error: TriptychError) -> bool:
        """The oldest plan in flight raises."""
        if self.in_flight:
            self.in_flight[0] = (self.in_flight[0][0], error)
        return self.commit()

    def turn(self) -> bool:
        """One turn of the loop: launch a plan if there is one, else end the oldest."""
        is_booked = self.book() is not None
        if len(self.in_flight) >= self.depth or not is_booked:
            return self.commit() or is_booked
        return is_booked

    def step(self) -> bool:
        """Launch as far as depth allows, then end the oldest plan."""
        while self.book() is not None:
            pass
        return self.commit()

    def run(self, max_steps: int = 20_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError("the scheduler does not come to rest")

    def let_all_go_on(self) -> None:
        """End every pause, then run to the end."""
        for job_id in self.jobs:
            self.scheduler.set_paused(job_id, False)
        self.run()
        self.scheduler.check()

    def payloads(self, job_id: str) -> list[Any]:
        """What a job was sent, errors left out."""
        return [out.payload for out in self.outputs[job_id] if out.payload is not None]

    def has_ended(self, job_id: str) -> bool:
        return self.outputs.final(job_id) is not None
