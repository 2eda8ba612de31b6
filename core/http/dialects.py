"""The API dialects (OpenAI, Anthropic, ...), as far as middlewares need to know them.

Owns how a request's dialect is recognized before a route is found, and the differences between
dialects in errors and in the header with the request id. Knows none by name: each comes with its
routers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import Scope

from triptych.core.errors import TriptychError


def own_status(error: TriptychError) -> int:
    """Return the error's default status."""
    return error.status


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API. Its requests have a path below `prefix` or the `header` that its clients send.

    `error` formats an error with the request id, `status` returns its HTTP status. Responses also
    carry the id in `id_header`, if the API has one.
    """

    prefix: str
    header: str = ""
    id_header: str = ""
    error: Callable[[TriptychError, str], BaseModel]
    status: Callable[[TriptychError], int] = own_status

    def id_headers(self, request_id: str) -> dict[str, str]:
        """Return the response headers with the request id."""
        return dict.fromkeys(filter(None, ("x-request-id", self.id_header)), request_id)

    def matches(self, scope: Scope) -> bool:
        """Whether a request belongs to this API."""
        path = scope["path"]
        is_below = path == self.prefix or path.startswith(f"{self.prefix}/")
        return is_below or (bool(self.header) and self.header in Headers(scope=scope))


def named_message(error: TriptychError) -> str:
    """Return the message with the field's name, for APIs whose errors cannot hold it separately."""
    is_named = not error.param or error.param in error.message
    return error.message if is_named else f"{error.param}: {error.message}"


def dialect_of(scope: Scope, dialects: Iterable[Dialect], default: Dialect) -> Dialect:
    """Return the API of a request, before it is routed."""
    return next((each for each in dialects if each.matches(scope)), default)
