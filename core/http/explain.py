"""`/v1/engine/explain/{request_id}`: why a request waited, and where its seconds went.

Owns the format. The accounts are the engine's (`core.engine_api.job_report`); with replicas there
are also the estimates by which the router chose. Callers see only their own requests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel

from triptych.core.engine_api.client import EngineClient
from triptych.core.engine_api.job_report import JobReport
from triptych.core.engine_api.journal import JournalEntry
from triptych.core.errors import NotFound
from triptych.core.http.context import Context
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.http.recent_requests import RecentRequest, RecentRequests
from triptych.core.limits import MAX_REQUEST_ID_CHARS
from triptych.core.router.client import ReplicatedClient
from triptych.core.router.request import RoutedRequest

RequestId = Annotated[str, Path(max_length=MAX_REQUEST_ID_CHARS)]
BETWEEN_STEPS = "between_steps"
"""The seconds of a job in which it neither waited to begin nor had a step on the device."""


class ChosenReplica(BaseModel):
    """A replica that a job was sent to.

    The replica had `wait_s` seconds of work queued, the least busy one `least_wait_s`.
    `cached_tokens` of the prompt were likely in its cache, which saves `saved_s`.
    """

    replica: str
    wait_s: float
    least_wait_s: float
    cached_tokens: int
    saved_s: float


class DeviceWork(BaseModel):
    """Steps of one kind that ended while a job waited: `busy_s` seconds of the device."""

    model: str
    kind: str
    busy_s: float


class JobStage(BaseModel):
    """Successive steps of one stage of a job, in seconds since its arrival.

    They took `busy_s` of device time; `num_shared` of them also computed for other jobs.
    """

    stage: str
    start_s: float
    end_s: float
    busy_s: float
    num_steps: int
    num_shared: int


class SkippedSteps(BaseModel):
    """The denoising steps of an image that its step cache skipped, counted from 0."""

    image: int
    steps: list[int]


class ExplainedJob(BaseModel):
    """A job of a request, such as one of its samples, as its engine ran it.

    `seconds` is where its `length_s` went. `arrival_s` is the time of its arrival on the clock of
    `/v1/engine/events`. The last of `replicas` ran it.
    """

    job_id: str
    model: str
    state: str
    error: str
    arrival_s: float | None
    submitted_s: float
    length_s: float
    first_output_s: float | None
    seconds: dict[str, float]
    jobs_ahead: int
    waited_behind: list[DeviceWork]
    sat_out: dict[str, int]
    stages: list[JobStage]
    counts: dict[str, int]
    skipped_steps: list[SkippedSteps]
    replicas: list[ChosenReplica]


class Explanation(BaseModel):
    """A request and its jobs, in seconds since its arrival.

    Its first job was submitted after `prepare_s`, and its response ended `finish_s` after its last
    job. `status` is null while the response is being sent.
    """

    request_id: str
    route: str
    status: int | None
    length_s: float
    prepare_s: float
    finish_s: float
    jobs: list[ExplainedJob]


def explain_router(client: EngineClient, requests: RecentRequests) -> APIRouter:
    """Create the route; `client` serves replicas or one engine."""
    router = APIRouter(tags=["engine"])

    @router.get("/v1/engine/explain/{request_id}", responses=ERROR_RESPONSES)
    async def explain(request_id: RequestId, request: Request) -> Explanation:
        """Explain a recent request, by the id in its response's X-Request-Id."""
        found = requests.find(request_id, Context.of(request).principal.owner)
        jobs = client.journal.call(found.call_id) if found is not None else ()
        if found is None or not jobs:
            raise NotFound(
                "No recent request of yours with work for a model has this id. It is in the"
                " X-Request-Id of the response; the server remembers the last few thousand."
            )
        routed: Mapping[str, RoutedRequest] = {}
        if isinstance(client, ReplicatedClient):
            routed = client.explain(found.call_id)
        now_s = time.monotonic()
        ended_s = now_s if found.ended_s is None else found.ended_s
        last_s = max(now_s if job.ended_s is None else job.ended_s for job in jobs)
        return Explanation(
            request_id=request_id,
            route=found.route,
            status=found.status,
            length_s=_round(ended_s - found.arrived_s),
            prepare_s=_round(jobs[0].submitted_s - found.arrived_s),
            finish_s=_round(max(0.0, ended_s - last_s)),
            jobs=[_explained(job, found, routed.get(job.job_id)) for job in jobs],
        )

    return router


def _explained(
    job: JournalEntry, request: RecentRequest, routed: RoutedRequest | None
) -> ExplainedJob:
    report = job.report or _unreported(job)
    prompt = {"prompt_tokens": routed.num_tokens} if routed is not None else {}
    first_s = report.first_output_s
    return ExplainedJob(
        job_id=job.job_id,
        model=job.model,
        state=report.state,
        error=job.error,
        arrival_s=_round(report.arrival_s) if job.report is not None else None,
        submitted_s=_round(job.submitted_s - request.arrived_s),
        length_s=_round(report.length_s),
        first_output_s=None if first_s is None else _round(first_s),
        seconds=_seconds(report) if job.report is not None else {},
        jobs_ahead=report.jobs_ahead,
        waited_behind=[
            DeviceWork(model=work.model, kind=work.kind, busy_s=_round(work.busy_s))
            for work in report.behind
        ],
        sat_out=report.sat_out,
        stages=_stages(report),
        counts=prompt | report.counts,
        skipped_steps=[SkippedSteps(image=i, steps=steps) for i, steps in report.skipped.items()],
        replicas=_replicas(routed),
    )


def _unreported(job: JournalEntry) -> JobReport:
    """The little that is known of a job that runs, or whose engine has sent no account."""
    now_s = time.monotonic() if job.ended_s is None else job.ended_s
    ended = "failed" if job.error else "cancelled"
    state = "running" if job.ended_s is None else ended
    return JobReport(state=state, arrival_s=0.0, length_s=now_s - job.submitted_s)


def _seconds(report: JobReport) -> dict[str, float]:
    """Divide the length of a job among its waits, its stages and the rest."""
    found = dict(report.waits)
    for span in report.spans:
        found[span.stage] = found.get(span.stage, 0.0) + span.busy_s
    found[BETWEEN_STEPS] = max(0.0, report.length_s - sum(found.values()))
    return {name: _round(seconds) for name, seconds in found.items()}


def _stages(report: JobReport) -> list[JobStage]:
    return [
        JobStage(
            stage=span.stage,
            start_s=_round(span.start_s),
            end_s=_round(span.end_s),
            busy_s=_round(span.busy_s),
            num_steps=span.num_steps,
            num_shared=span.num_shared,
        )
        for span in report.spans
    ]


def _replicas(routed: RoutedRequest | None) -> list[ChosenReplica]:
    choices = (routed.choices or ()) if routed is not None else ()
    return [
        ChosenReplica(
            replica=choice.replica,
            wait_s=round(choice.wait_s, 4),
            least_wait_s=round(choice.least_wait_s, 4),
            cached_tokens=choice.held_tokens,
            saved_s=round(choice.saved_s, 4),
        )
        for choice in choices
    ]


def _round(seconds: float) -> float:
    """Round seconds to microseconds, the precision of the engine's events."""
    return round(seconds, 6)
