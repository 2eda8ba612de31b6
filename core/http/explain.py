"""`/v1/engine/explain/{request_id}`: which replicas a request went to, and why.

Owns the words. What is told is the router's prediction when it chose; what was found cached in the
end is in the answer's usage.
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

    There were `wait_s` seconds of work before the job, at least `least_wait_s` on any replica.
    `cached_tokens` of its prompt were likely to be in that replica's cache, which saves `saved_s`.
    """

    replica: str
    wait_s: float
    least_wait_s: float
    cached_tokens: int
    saved_s: float


class ExplainedJob(BaseModel):
    """A job of a request, as each of several samples is. The last of `replicas` kept it."""

    job_id: str
    model: str
    prompt_tokens: int
    replicas: list[ChosenReplica]


class Explanation(BaseModel):
    """Where a request went."""

    request_id: str
    jobs: list[ExplainedJob]


def explain_router(client: EngineClient) -> APIRouter:
    """The route, in front of replicas or of one engine."""
    router = APIRouter(tags=["engine"])

    @router.get("/v1/engine/explain/{request_id}", responses=ERROR_RESPONSES)
    async def explain(request_id: RequestId) -> Explanation:
        """Where one of the last requests went, by the id that its answer's X-Request-Id named."""
        if not isinstance(client, ReplicatedClient):
            raise NotFound("There is one engine here, which every request goes to.")
        routed = client.explain(request_id.removeprefix(_PREFIX))
        if not routed:
            raise NotFound(
                "No request of this id was sent to a replica lately. Ids are those of the server:"
                " send no X-Request-Id of your own."
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
