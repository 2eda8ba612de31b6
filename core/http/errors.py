"""The one table from exceptions to answers, in the shape of OpenAI's errors.

Owns what a client sees of a failure: `{"error": {message, type, param, code, request_id}}`, or what
else the API has that it speaks, the status, and `Retry-After`. What a client never sees is a path,
an address or a traceback.
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

UNION_TAG = ":"
"""Tags of discriminated unions begin with it, so that errors can leave them out of a path."""

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_MAX_SHOWN_CHARS = 120


class ErrorDetail(BaseModel):
    """What went wrong. `code` is stable; `message` says what to do."""

    message: str
    type: str
    param: str | None
    code: str
    request_id: str


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is wrong or was refused."},
    "5XX": {"model": ErrorBody, "description": "The server could not answer."},
}
"""For the `responses` of every route."""


def to_public(error: BaseException) -> TriptychError:
    """The error a client may see in place of `error`."""
    if isinstance(error, ModelTooLarge):
        return error
    if isinstance(error, SetupError):  # names files and owners of memory: for the log only
        return Unavailable("The model cannot be served right now; the server's log says why.")
    if isinstance(error, TriptychError):
        return error
    if isinstance(error, RequestValidationError):
        return _from_validation(error.errors())
    if isinstance(error, HTTPException):
        return _from_http(error)
    return InternalError("An internal error occurred; the server's log has it by request id.")


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
"""What is spoken wherever no other API is."""


def error_document(error: BaseException, scope: Scope) -> BaseModel:
    """What the answer to a request says of `error`, in the words of its API."""
    state = scope["state"]
    dialect: Dialect = state.get("dialect", OPENAI)
    return dialect.error(to_public(error), state["request_id"])


def error_headers(error: TriptychError) -> dict[str, str]:
    """The headers that belong to `error`."""
    headers = {"content-type": "application/json"}
    if isinstance(error, Unavailable) or error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or 1)))
    if isinstance(error, ModelTooLarge):
        headers["x-should-retry"] = "false"  # clients of OpenAI and Anthropic heed it
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return headers


def error_response(error: BaseException, request_id: str, dialect: Dialect = OPENAI) -> Response:
    """The whole answer for `error`."""
    public = to_public(error)
    body = dialect.error(public, request_id).model_dump_json()
    return Response(body, status_code=dialect.status(public), headers=error_headers(public))


def error_answer(error: BaseException, scope: Scope) -> Response:
    """The whole answer to a request, in the words of its API."""
    state = scope["state"]
    return error_response(error, state["request_id"], state.get("dialect", OPENAI))


async def handle_error(request: Request, error: Exception) -> Response:
    """FastAPI's exception handler for every error of the table."""
    return error_answer(error, request.scope)


def _from_http(error: HTTPException) -> TriptychError:
    if error.status_code == 404:
        return NotFound("There is no such route here.")
    if error.status_code == 405:
        return MethodNotAllowed("This route does not take that method.")
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
        return InvalidRequest(f"Unknown field: {field}.", param=field)
    if first["type"] == "missing":
        return InvalidRequest(f"{field or 'The body'} is required.", param=field)
    return InvalidRequest(f"{field or 'The body'}: {first['msg']}.", param=field)


def _path(loc: Iterable[int | str]) -> str | None:
    """`messages[0].content` of ("body", "messages", 0, "content", ":text")."""
    path = ""
    for part in list(loc)[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(UNION_TAG):
            path += f".{part}" if path else part
    printable = "".join(char for char in path if char.isprintable())
    return printable[:_MAX_SHOWN_CHARS] or None
