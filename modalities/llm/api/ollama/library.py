"""`/api/pull` and `/api/delete`: models that come and go, as Ollama's clients ask for them.

Owns their names for references and the lines of progress. `core.http.runtime_models` has the work.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from triptych.core.http.engine_models import check_may_store, followed, lift_time_limit
from triptych.core.http.model_names import without_tag
from triptych.core.http.models import ModelCard
from triptych.core.http.runtime_models import Pull, RuntimeModels
from triptych.core.http.sse import LineStream, described_lines
from triptych.core.weights.fetching import FetchProgress
from triptych.modalities.llm.api.ollama.dialect import OllamaError, OllamaRoute
from triptych.modalities.llm.api.ollama.models import Catalogue
from triptych.modalities.llm.api.ollama.protocol import DeleteRequest, PullRequest

_HUB_PREFIXES = ("hf.co/", "huggingface.co/")


class PullLine(BaseModel):
    """A line of `/api/pull`. Lines of one task have one `digest`, from which clients make a bar."""

    status: str
    digest: str | None = None
    total: int | None = None
    completed: int | None = None


def add_library(router: APIRouter, catalogue: Catalogue) -> None:
    """Add the routes."""

    async def pull(body: PullRequest, request: Request) -> Response:
        """Fetch a model and serve it; a served one is confirmed."""
        reference, begun = body.requested_name, None
        if not catalogue.has(reference):
            check_may_store(request)
            lift_time_limit(request)
            begun = RuntimeModels.of(request).pull(_reference(reference))
        if body.stream is not False:
            return LineStream(_lines(reference, begun))
        async with aclosing(_lines(reference, begun)) as lines:
            *_, last = [line async for line in lines]
        return Response(last.model_dump_json(exclude_unset=True), media_type="application/json")

    async def delete(body: DeleteRequest, request: Request) -> Response:
        """Serve a model no longer, and delete its files if they are in a cache."""
        check_may_store(request)
        lift_time_limit(request)
        await RuntimeModels.of(request).delete(catalogue.name(body.requested_name))
        return Response()

    content = described_lines(PullLine, OllamaError)
    answer = {"model": PullLine, "content": content, "description": "The progress."}
    for method, path, route in (("POST", "/api/pull", pull), ("DELETE", "/api/delete", delete)):
        router.add_api_route(
            path,
            route,
            methods=[method],
            response_model=None,
            responses={200: answer} if route is pull else {},
            route_class_override=OllamaRoute,
        )


def _reference(name: str) -> str:
    """The reference that a client means: it may write a tag, and the hub's host before an id."""
    for prefix in _HUB_PREFIXES:
        name = name.removeprefix(prefix)
    return without_tag(name, ())


async def _lines(name: str, begun: Pull | ModelCard | None) -> AsyncGenerator[PullLine, None]:
    yield PullLine(status="pulling manifest")
    if begun is not None:
        async with aclosing(followed(begun)) as notes:
            async for note in notes:
                if isinstance(note, FetchProgress):
                    yield _line(name, note)
    yield PullLine(status="success")


def _line(name: str, note: FetchProgress) -> PullLine:
    """A line of progress; without a length, clients show the words alone."""
    words = f"{note.action.lower()} {name}"
    if not note.total_bytes:
        return PullLine(status=words)
    digest = f"sha256:{hashlib.sha256(words.encode()).hexdigest()}"
    return PullLine(
        status=words,
        digest=digest,
        total=note.total_bytes,
        completed=min(note.num_bytes, note.total_bytes),
    )
