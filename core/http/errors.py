"""The one mapping from exceptions to HTTP error responses.

Owns the body (`{"error": {message, type, param, code, request_id}}` for OpenAI, or the dialect's
own), the status and `Retry-After`. A client never sees a path, an address or a traceback.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from triptych.core.errors import (
    HeadersTooLarge,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    ModelTooLarge,
    NotFound,
    SetupError,
    TriptychError,
    Unauthorized,
    Unavailable,
)
from triptych.core.http.dialects import Dialect

NEAR = "near"
"""Key of the suggested name in the context of an error about an unknown field."""
UNION_TAG = ":"
"""Prefix of the tags of discriminated unions, so that errors can omit them from a path."""

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_MAX_SHOWN_CHARS = 120


class ErrorDetail(BaseModel):
    """An error. `code` is stable; `message` says what to do."""

    message: str
    type: str
    param: str | None
    code: str
    request_id: str


class ErrorBody(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is invalid or was refused."},
    "5XX": {"model": ErrorBody, "description": "The server could not answer."},
}
"""For the `responses` of every route."""


def to_public(error: BaseException) -> TriptychError:
    """Return the error to show to a client for `error`."""
    if isinstance(error, ModelTooLarge):
        return error
    if isinstance(error, SetupError):  # its message has paths and memory owners: for the log only
        return Unavailable("The model cannot be served right now; see the server's log.")
    if isinstance(error, TriptychError):
        return error
    if isinstance(error, RequestValidationError):
        return _from_validation(error.errors())
    if isinstance(error, HTTPException):
        return _from_http(error)
    return InternalError("An internal error occurred; see the server's log for this request id.")


def _openai_error(error: TriptychError, request_id: str) -> ErrorBody:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    detail = ErrorDetail(
        message=error.message,
        type=_TYPES.get(error.status, kind),
        param=error.param,
        code=error.code,
        request_id=request_id,
    )
    return ErrorBody(error=detail)


OPENAI = Dialect(prefix="", error=_openai_error)
"""The default dialect."""


def error_document(error: BaseException, scope: Scope) -> BaseModel:
    """Build the error body of a request in its API's format."""
    state = scope["state"]
    dialect: Dialect = state.get("dialect", OPENAI)
    return dialect.error(to_public(error), state["request_id"])


def error_headers(error: TriptychError) -> dict[str, str]:
    """Return the response headers of `error`."""
    headers = {"content-type": "application/json"}
    if isinstance(error, Unavailable) or error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or 1)))
    if isinstance(error, ModelTooLarge):
        headers["x-should-retry"] = "false"  # clients of OpenAI and Anthropic heed it
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return headers


def error_response(error: BaseException, request_id: str, dialect: Dialect = OPENAI) -> Response:
    """Build the response for `error`."""
    public = to_public(error)
    body = dialect.error(public, request_id).model_dump_json()
    return Response(body, status_code=dialect.status(public), headers=error_headers(public))


def error_answer(error: BaseException, scope: Scope) -> Response:
    """Build the error response to a request in its API's format."""
    state = scope["state"]
    return error_response(error, state["request_id"], state.get("dialect", OPENAI))


async def handle_error(request: Request, error: Exception) -> Response:
    """Handle every error of the tree for FastAPI."""
    return error_answer(error, request.scope)


def _from_http(error: HTTPException) -> TriptychError:
    if error.status_code == 404:
        return NotFound("There is no such route.")
    if error.status_code == 405:
        return MethodNotAllowed("This route does not support the method.")
    if error.status_code == 431:
        return HeadersTooLarge("The headers are too large.")
    if error.status_code < 500:
        return InvalidRequest("The request could not be read.")
    return InternalError("An internal error occurred.")


def _from_validation(errors: Sequence[Mapping[str, Any]]) -> TriptychError:
    first = errors[0]
    field = _path(first["loc"])
    own = first.get("ctx", {}).get("error")
    if isinstance(own, TriptychError):
        return own if own.param else type(own)(own.message, param=field)
    if first["type"] == "extra_forbidden":
        near = first.get("ctx", {}).get(NEAR)
        hint = f"; did you mean {near}?" if near else "."
        return InvalidRequest(f"Unknown field: {field}{hint}", param=field)
    if first["type"] == "missing":
        return InvalidRequest(f"{field or 'The body'} is required.", param=field)
    return InvalidRequest(f"{field or 'The body'}: {first['msg']}.", param=field)


def _path(loc: Iterable[int | str]) -> str | None:
    """Format a location: ("body", "messages", 0, "content", ":text") is `messages[0].content`."""
    path = ""
    for part in list(loc)[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(UNION_TAG):
            path += f".{part}" if path else part
    printable = "".join(char for char in path if char.isprintable())
    return printable[:_MAX_SHOWN_CHARS] or None
