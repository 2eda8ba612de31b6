"""Sleep and wake: the device's memory is freed for other programs, and the server stays up.

Owns the routes of vLLM (`/sleep`, `/wake_up`, `/is_sleeping`) and SGLang
(`/release_memory_occupation`, `/resume_memory_occupation`). Requests in flight are finished first,
or ended on demand; during the sleep requests are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from triptych.core.engine_api.client import EngineClient
from triptych.core.engine_api.model_changes import Sleep, Wake
from triptych.core.engine_api.reports import ASLEEP
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.body import StrictRoute, parse_json, read_body
from triptych.core.http.engine_models import check_is_admin, lift_time_limit
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.http.fields import Label
from triptych.core.http.runtime_models import RuntimeModels, refused_models
from triptych.core.weights.file_cache import advise

_Tags = Annotated[list[Label], Field(max_length=8)]
_PARTS = frozenset({"weights", "kv_cache"})
_POLL_S, _MAX_POLLS = 0.01, 500


class SleepState(BaseModel):
    """Whether the models are out of memory."""

    is_sleeping: bool


def sleep_router(client: EngineClient) -> APIRouter:
    """Create the routes. With API keys, an admin key is needed to change the state."""
    router = APIRouter(route_class=StrictRoute, responses=ERROR_RESPONSES, tags=["engine"])

    @router.post("/sleep")
    async def sleep(
        request: Request,
        level: Annotated[int, Query(ge=1, le=2)] = 1,
        mode: Literal["wait", "abort"] = "wait",
    ) -> SleepState:
        """Unload all models: their weights stay in the system's file cache, or with level 2 not.

        Requests in flight are finished first, or ended with mode `abort`. `wake_up` brings back
        the models that were in memory.
        """
        return await _fall_asleep(request, client, Sleep(mode == "abort"), keeps_weights=level == 1)

    @router.post("/wake_up")
    async def wake_up(
        request: Request, tags: Annotated[_Tags | None, Query()] = None
    ) -> SleepState:
        """Load the models again that were in memory before the sleep."""
        return await _wake(request, client, tags)

    @router.get("/is_sleeping")
    async def is_sleeping() -> SleepState:
        """Whether the models are out of memory."""
        return SleepState(is_sleeping=_is_asleep(client))

    @router.post("/release_memory_occupation")
    async def release(request: Request) -> SleepState:
        """Unload all models, as `/sleep` does. A body is not needed."""
        _check_whole(await _tags(request))
        return await _fall_asleep(request, client, Sleep(), keeps_weights=True)

    @router.post("/resume_memory_occupation")
    async def resume(request: Request) -> SleepState:
        """Load the models again, as `/wake_up` does. A body is not needed."""
        return await _wake(request, client, await _tags(request))

    return router


async def _tags(request: Request) -> Sequence[str] | None:
    """Read the parts of the memory that SGLang's clients may name. Raises `InvalidRequest`."""
    raw = await read_body(request, request.app.state.options.max_request_bytes)
    fields = parse_json(raw) if raw else {}
    tags = fields.get("tags") if isinstance(fields, dict) and not fields.keys() - {"tags"} else 0
    if tags is None or (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)):
        return tags
    raise InvalidRequest('The body is empty, {} or {"tags": [NAMES]}.')


async def _fall_asleep(
    request: Request, client: EngineClient, change: Sleep, *, keeps_weights: bool
) -> SleepState:
    check_is_admin(request)
    lift_time_limit(request)
    await client.change(change)
    models: RuntimeModels | None = request.app.state.runtime_models
    folders = [model.folder for model in models.models.values()] if models else []
    await asyncio.to_thread(advise, folders, is_kept=keeps_weights)
    return await _reported(client, is_asleep=True)


async def _wake(request: Request, client: EngineClient, tags: Sequence[str] | None) -> SleepState:
    check_is_admin(request)
    _check_whole(tags)
    lift_time_limit(request)
    with refused_models():
        await client.change(Wake())
    return await _reported(client, is_asleep=False)


def _check_whole(tags: Sequence[str] | None) -> None:
    if tags is not None and not _PARTS.issubset(tags):
        raise UnsupportedOption(
            "Weights and caches leave and come back together: leave tags out, or send both.",
            param="tags",
        )


async def _reported(client: EngineClient, *, is_asleep: bool) -> SleepState:
    """Wait for the report that follows a change, so that the next request meets it."""
    for _ in range(_MAX_POLLS):
        if _is_asleep(client) == is_asleep:
            break
        await asyncio.sleep(_POLL_S)
    return SleepState(is_sleeping=is_asleep)


def _is_asleep(client: EngineClient) -> bool:
    beat = client.status().last_beat
    return beat is not None and beat.phase == ASLEEP
