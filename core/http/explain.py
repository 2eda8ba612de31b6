"""`/v1/engine/explain/{request_id}`: which replicas got a request, and why.

Owns the format. It reports the router's prediction at the time of choice; the tokens that were
really cached are in the response's usage.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import BaseModel

from triptych.core.engine_api.client import EngineClient
from triptych.core.errors import NotFound
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.limits import MAX_REQUEST_ID_CHARS
from triptych.core.router.client import ReplicatedClient
from triptych.core.router.request import RoutedRequest

RequestId = Annotated[str, Path(max_length=MAX_REQUEST_ID_CHARS)]
_PREFIX = "req-"


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


class ExplainedJob(BaseModel):
    """A job of a request, such as one of its samples. The last of `replicas` ran it."""

    job_id: str
    model: str
    prompt_tokens: int
    replicas: list[ChosenReplica]


class Explanation(BaseModel):
    """The jobs of a request and their replicas."""

    request_id: str
    jobs: list[ExplainedJob]


def explain_router(client: EngineClient) -> APIRouter:
    """Create the route; `client` serves replicas or one engine."""
    router = APIRouter(tags=["engine"])

    @router.get("/v1/engine/explain/{request_id}", responses=ERROR_RESPONSES)
    async def explain(request_id: RequestId) -> Explanation:
        """Explain the routing of a recent request, by the id in its response's X-Request-Id."""
        if not isinstance(client, ReplicatedClient):
            raise NotFound("This server has one engine, which gets every request.")
        routed = client.explain(request_id.removeprefix(_PREFIX))
        if not routed:
            raise NotFound(
                "No recent request has this id. Only ids that the server generated work: send no"
                " X-Request-Id."
            )
        jobs = [_explained(job_id, each) for job_id, each in routed.items()]
        return Explanation(request_id=request_id, jobs=jobs)

    return router


def _explained(job_id: str, routed: RoutedRequest) -> ExplainedJob:
    return ExplainedJob(
        job_id=job_id,
        model=routed.model,
        prompt_tokens=routed.num_tokens,
        replicas=[
            ChosenReplica(
                replica=choice.replica,
                wait_s=round(choice.wait_s, 4),
                least_wait_s=round(choice.least_wait_s, 4),
                cached_tokens=choice.held_tokens,
                saved_s=round(choice.saved_s, 4),
            )
            for choice in routed.choices or ()
        ],
    )
