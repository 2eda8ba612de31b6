"""The APIs there are, as far as what surrounds the routes has to know them.

Owns how one is recognized, before there is a route and where there is none, and what differs from
OpenAI's: the errors, and the header with a request's id. Knows none by name: each comes with its
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
    """The status that the error has by itself."""
    return error.status


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API. Its requests are at `prefix` and below, or have `header`, as its clients do.

    `error` writes an error and the id of its request, `status` is what it is sent with. Answers
    have that id in `id_header`, too, where the API has such a one.
    """

    prefix: str
    header: str = ""
    id_header: str = ""
    error: Callable[[TriptychError, str], BaseModel]
    status: Callable[[TriptychError], int] = own_status

    def id_headers(self, request_id: str) -> dict[str, str]:
        """The headers by which an answer tells the id of its request."""
        return dict.fromkeys(filter(None, ("x-request-id", self.id_header)), request_id)

    def matches(self, scope: Scope) -> bool:
        """Whether a request is of this API."""
        path = scope["path"]
        is_below = path == self.prefix or path.startswith(f"{self.prefix}/")
        return is_below or (bool(self.header) and self.header in Headers(scope=scope))


def named_message(error: TriptychError) -> str:
    """What an error says, for an API that has no other place for the name of the field."""
    is_named = not error.param or error.param in error.message
    return error.message if is_named else f"{error.param}: {error.message}"


def dialect_of(scope: Scope, dialects: Iterable[Dialect], default: Dialect) -> Dialect:
    """The API of a request, before anything is known of its route."""
    return next((each for each in dialects if each.matches(scope)), default)
