"""The conventions of Anthropic's API on all routes: errors, versions and ids of requests.

Owns the types of its errors by status. Knows only the prefix of its routes.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import Request
from pydantic import BaseModel

from triptych.core.errors import (
    ContextLengthExceeded,
    Overloaded,
    TriptychError,
    UnsupportedOption,
)
from triptych.core.http.dialects import Dialect, named_message

PREFIX = "/v1/messages"
VERSION_HEADER = "anthropic-version"
_VERSIONS = ("2026-10-21", "2023-06-01")
"""The newer version has no sampling parameters; here they are honoured in both."""
_OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    _OVERLOADED: "overloaded_error",
}


class AnthropicErrorDetail(BaseModel):
    """The type and the message of an error."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """The body of every error answer, and the last event of a broken stream."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": AnthropicError, "description": "The request is wrong or was refused."},
    "5XX": {"model": AnthropicError, "description": "The server could not answer."},
}
"""For the `responses` of every route."""


def check_version(request: Request) -> None:
    """Raise `UnsupportedOption` for an unknown version of the API."""
    if request.headers.get(VERSION_HEADER, _VERSIONS[0]) not in _VERSIONS:
        raise UnsupportedOption(f"{VERSION_HEADER}: must be {' or '.join(_VERSIONS)}.")


def _status(error: TriptychError) -> int:
    return _OVERLOADED if isinstance(error, Overloaded) else error.status


def _error(error: TriptychError, request_id: str) -> AnthropicError:
    status = _status(error)
    kind = "api_error" if status >= 500 else "invalid_request_error"
    message = named_message(error)
    if isinstance(error, ContextLengthExceeded):  # clients look for these words
        message = f"prompt is too long: {message}"
    detail = AnthropicErrorDetail(type=_TYPES.get(status, kind), message=message)
    return AnthropicError(type="error", error=detail, request_id=request_id)


ANTHROPIC = Dialect(
    prefix=PREFIX,
    header=VERSION_HEADER,
    id_header="request-id",
    error=_error,
    status=_status,
)
