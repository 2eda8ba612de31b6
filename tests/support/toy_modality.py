"""A modality of its own in one file: it counts to a number. Nothing of Triptych knows it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel

from triptych.core.engine_api.job import Job, JobState, Output
from triptych.core.engine_api.plan import Plan, StepResult
from triptych.core.errors import TriptychError, to_info
from triptych.core.http.context import Context
from triptych.core.http.models import ModelCard
from triptych.core.options.command import Command
from triptych.modalities.modality import ApiPart, ApiSetup, Modality
from triptych.schedulers.base import LoadedModel, Proposal, SchedulerStats
from triptych.schedulers.batcher import ScheduledStep
from triptych.schedulers.cost import CostModel


class CountRequest(msgspec.Struct, frozen=True, tag="count"):
    """Count to `last`."""

    last: int
    tenant: str = ""


class CountDelta(msgspec.Struct, frozen=True, tag="counted"):
    """One more."""

    number: int


class CountBody(BaseModel):
    """What a caller sends."""

    model: str
    last: int


def open_api(setup: ApiSetup) -> ApiPart:
    router = APIRouter()
    names = [model.name for model in setup.models["counting"]]

    @router.post("/v1/count")
    async def count(body: CountBody, request: Request) -> list[int]:
        call_id = Context.of(request).call_id
        stream = setup.client.submit(body.model, CountRequest(body.last), job_id=call_id)
        return [output.payload.number async for output in stream if output.payload is not None]

    return ApiPart([router], [ModelCard(id=name, task="counting") for name in names])


@dataclass
class CountScheduler:
    """One job a step, in the order of arrival."""

    model: str
    jobs: dict[str, Job] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    booked: set[str] = field(default_factory=set)
    costs: CostModel = field(default_factory=CostModel)

    def submit(self, job: Job) -> None:
        self.jobs[job.job_id] = job
        self.counted[job.job_id] = 0

    def cancel(self, job_id: str) -> None:
        self._end(job_id, JobState.CANCELLED)

    def set_step_budget(self, budget_s: float) -> None:
        """Steps cannot be made shorter."""

    def set_paused(self, job_id: str, is_paused: bool) -> None:
        self.jobs[job_id].is_paused = is_paused

    def propose(self, now_s: float) -> Proposal | None:
        ready = [job_id for job_id in self.jobs if job_id not in self.booked]
        if not ready:
            return None
        return ScheduledStep(
            kind="count",
            model=self.model,
            cost_s=self.costs.predict("count", {"rows": 1.0}),
            rows=(ready[0],),
        )

    def book(self, proposal: Proposal, step_id: int, now_s: float) -> Plan | None:
        assert isinstance(proposal, ScheduledStep)
        (job_id,) = proposal.rows
        self.booked.add(job_id)
        return CountPlan(step_id=step_id, model=self.model, kind="count", job_id=job_id)

    def commit(self, plan: Plan, result: StepResult, now_s: float) -> None:
        assert isinstance(plan, CountPlan)
        self.booked.discard(plan.job_id)
        job = self.jobs[plan.job_id]
        number = self.counted[plan.job_id] = self.counted[plan.job_id] + 1
        job.sink(Output(job_id=job.job_id, payload=CountDelta(number)))
        if number == job.request.last:
            self._end(job.job_id, JobState.FINISHED)

    def fail(self, plan: Plan, error: TriptychError, now_s: float) -> None:
        assert isinstance(plan, CountPlan)
        self._end(plan.job_id, JobState.FAILED, error)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(num_waiting=0, num_running=len(self.jobs), gauges={}, counters={})

    def check(self) -> None:
        assert set(self.counted) == set(self.jobs)

    def _end(self, job_id: str, state: JobState, error: TriptychError | None = None) -> None:
        job = self.jobs.pop(job_id)
        del self.counted[job_id]
        self.booked.discard(job_id)
        job.state = state
        job.sink(Output(job_id=job_id, is_final=True, error=to_info(error) if error else None))


@dataclass(frozen=True, kw_only=True)
class CountPlan(Plan):
    """Say the next number of one job."""

    job_id: str


class CountRunner:
    """Nothing is computed."""

    def launch(self, plan: Plan) -> CountRunner:
        self._step_id = plan.step_id
        return self

    def result(self) -> StepResult:
        return StepResult()

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class CountLoader:
    """Implements `schedulers.base.ModelLoader`."""

    resolved: Any
    config: Any
    device: Any
    ledger: Any

    @property
    def name(self) -> str:
        return str(self.resolved.name)

    def check_size(self) -> None:
        pass

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        return LoadedModel(
            name=self.name,
            scheduler=CountScheduler(self.name),
            runner=CountRunner(),
            close=lambda: None,
        )


class CountPipeline:
    """Found by its name in `triptych`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("last", type=int)


def run(args: argparse.Namespace) -> int:
    print(*range(1, args.last + 1))
    return 0


def _matches(folder: Path, config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "counter"


COUNTING = Modality(
    role="counting",
    task=("counting", "counts", "/v1/count"),
    matches=_matches,
    wire=(f"{__name__}:CountRequest", f"{__name__}:CountDelta"),
    api=f"{__name__}:open_api",
    engine=f"{__name__}:CountLoader",
    pipelines={"CountPipeline": __name__},
    commands=(Command("count", "Count.", __name__, ("triptych count 3",)),),
)
