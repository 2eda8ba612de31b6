"""The conventions of Ollama's API on all routes: errors, names of models, times.

Owns these conventions. Knows only the prefix of its routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import Request
from pydantic import BaseModel

from triptych.core.engine_api.client import EngineClient
from triptych.core.engine_api.model_changes import KeepModel
from triptych.core.errors import TriptychError
from triptych.core.http.body import StrictRoute, note_ignored
from triptych.core.http.context import Context
from triptych.core.http.dialects import Dialect, named_message
from triptych.modalities.llm.api.ollama.protocol import OllamaRequest

PREFIX = "/api"


class OllamaError(BaseModel):
    """The body of every error answer, and the last line of a broken stream."""

    error: str


OLLAMA_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": OllamaError, "description": "The request is wrong or was refused."},
    "5XX": {"model": OllamaError, "description": "The server could not answer."},
}
"""For the `responses` of every route."""


def _error(error: TriptychError, request_id: str) -> OllamaError:
    return OllamaError(error=named_message(error))


class OllamaRoute(StrictRoute):
    """A route of Ollama's API, which reads JSON of any content type, as its examples send it."""

    takes_any_type = True


OLLAMA = Dialect(prefix=PREFIX, error=_error)


_unloads: set[asyncio.Task[None]] = set()


async def keep_model(
    request: Request, body: OllamaRequest, client: EngineClient, model: str
) -> Callable[[], None]:
    """Keep a model in memory for as long as `keep_alive` says; return the call after the answer.

    With 0 that call unloads the model. For callers who may not unload it, `keep_alive` is reported
    as ignored.
    """
    keep_s = body.keep_s
    if keep_s is None:
        return _do_nothing
    if not Context.of(request).principal.is_admin:
        note_ignored(request, "keep_alive")
        return _do_nothing
    if keep_s == 0:
        return partial(_begin_unload, client, model)
    await client.change(KeepModel(model, keep_s))
    return _do_nothing


def _do_nothing() -> None:
    """Do nothing: the model stays."""


def _begin_unload(client: EngineClient, model: str) -> None:
    """Unload a model in the background: the request may be over or cancelled."""
    task = asyncio.create_task(_unload(client, model))
    _unloads.add(task)
    task.add_done_callback(_unloads.discard)


async def _unload(client: EngineClient, model: str) -> None:
    with suppress(TriptychError):  # without an engine, or without the model, nothing is in memory
        await client.unload(model)


def now_text() -> str:
    """The current time, as answers report it."""
    return time_text(datetime.now(UTC))


def time_text(time: datetime) -> str:
    """A time in UTC, in RFC 3339's format."""
    return time.isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """Seconds as nanoseconds, the unit of all durations."""
    return max(0, round(seconds * 1e9))
