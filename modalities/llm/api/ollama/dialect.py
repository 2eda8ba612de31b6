"""What Ollama's API does in its own way whatever the route: errors, names of models, times.

Owns those. Knows no route but where they begin.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from pydantic import BaseModel

from triptych.core.errors import TriptychError
from triptych.core.http.body import StrictRoute, note_ignored
from triptych.core.http.dialects import Dialect, named_message
from triptych.modalities.llm.api.ollama.protocol import OllamaRequest

PREFIX = "/api"
_TAG = ":latest"


class OllamaError(BaseModel):
    """The body of every answer that is not a success, and the last line of a broken stream."""

    error: str


OLLAMA_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": OllamaError, "description": "The request is wrong or was refused."},
    "5XX": {"model": OllamaError, "description": "The server could not answer."},
}
"""For the `responses` of every route."""


def _error(error: TriptychError, request_id: str) -> OllamaError:
    return OllamaError(error=named_message(error))


class OllamaRoute(StrictRoute):
    """A route of Ollama's API, which reads JSON by whatever name: its examples say another."""

    takes_any_type = True


OLLAMA = Dialect(prefix=PREFIX, error=_error)


def note_keep_alive(request: Request, body: OllamaRequest) -> None:
    """Say of a `keep_alive` that it was ignored: it unloads nothing, and keeps nothing longer."""
    if body.keep_alive is not None:
        note_ignored(request, "keep_alive")


def tagged(name: str) -> str:
    """A model's name as Ollama's clients know it: there is a tag in each."""
    return name if ":" in name else name + _TAG


def untagged(name: str, known: Collection[str]) -> str:
    """The served name of what a client calls a model."""
    return name if name in known else name.removesuffix(_TAG)


def now_text() -> str:
    """The time, as every answer tells it."""
    return time_text(datetime.now(UTC))


def time_text(time: datetime) -> str:
    """A time in UTC, as RFC 3339 writes it."""
    return time.isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """Seconds in the unit of all durations."""
    return max(0, round(seconds * 1e9))
