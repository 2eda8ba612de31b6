"""Reads and parses request bodies into validated JSON.

Owns reading, limited by time and by the bytes received whatever `Content-Length` says, and strict
JSON: no duplicate keys, no NaN or infinity, no lone surrogates, bounded depth and width. Knows no
fields: those belong to the route's pydantic model. `StrictRoute` puts this before FastAPI's own
handling, adds a missing model name, and lists the fields that the model ignores in a header.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, NoReturn

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from triptych.core.errors import (
    IGNORED_HEADER,
    InvalidRequest,
    PayloadTooLarge,
    RequestTimeout,
    UnsupportedMedia,
)
from triptych.core.http.fields import ignored_in
from triptych.core.http.models import with_model
from triptych.core.http.validation import with_near_name
from triptych.core.limits import (
    BODY_TIMEOUT_S,
    MAX_JSON_CONTAINERS,
    MAX_JSON_DEPTH,
    MAX_JSON_FIELDS,
)
from triptych.core.text.threads import on_text_thread

# Every string, closed or not: always matches from its opening quote on, so the scan is linear.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
# A limited number of strings and the bytes between them, so that one match holds the GIL briefly.
_STRETCH = re.compile(rb'(?!\Z)[^"]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"?[^"]*+){0,4096}', re.DOTALL)
_LARGE_BYTES = 2**14
"""Larger bodies are parsed on a thread: validating a body of this size, full of empty messages,
takes milliseconds."""
_JSON = "application/json"
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class StrictRoute(APIRoute):
    """A route whose JSON body is read and parsed before FastAPI sees it.

    If it `takes_any_type`, a request may declare a content type other than JSON, except from a web
    page: browsers send a preflight request before JSON, but not before some other types.
    """

    takes_any_type: ClassVar[bool] = False

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler; a route without a body keeps it."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def strict(request: Request) -> Response:
            if not self.takes_any_type or "origin" in request.headers:
                _check_media_type(request)
            check_not_compressed(request)
            raw = await self.read(request)
            if self.num_bytes(request, raw) <= _LARGE_BYTES:
                value = self._fields(request, raw)
            else:
                value = await on_text_thread(len(raw), self._validated, request, raw)
            try:
                response = await handler(_Parsed(request, raw, value))
            except RequestValidationError as error:
                raise RequestValidationError(with_near_name(self._kind, error.errors())) from error
            return _with_ignored(request, response)

        return strict

    def _fields(self, request: Request, raw: bytes) -> Any:
        """Parse the body, add a missing model name, and note ignored fields for the header."""
        value = with_model(request, self._kind, self.parse(request, raw))
        observe_body(request, raw, value)
        note_ignored(request, *ignored_in(self._kind, value))
        return value

    @property
    def _kind(self) -> Any:
        """The type of the body."""
        assert self.body_field is not None
        return self.body_field.field_info.annotation

    def _validated(self, request: Request, raw: bytes) -> Any:
        """Validate a large body completely, so that no work is left on the event loop."""
        assert self.body_field is not None
        value, errors = self.body_field.validate(self._fields(request, raw), loc=("body",))
        if errors:
            raise RequestValidationError(with_near_name(self._kind, errors))
        return value

    async def read(self, request: Request) -> bytes:
        """Read the raw body."""
        return await read_body(request, request.app.state.options.max_request_bytes)

    def num_bytes(self, request: Request, raw: bytes) -> int:
        """Return the number of bytes to parse."""
        return len(raw)

    def parse(self, request: Request, raw: bytes) -> Any:
        """Parse the body. Raises `InvalidRequest`."""
        return parse_json(raw)


def observe_body(request: Request, raw: bytes, value: Any) -> None:
    """Pass a body, and its parsed `value`, to the log and the crash dumps, if there are any."""
    for observe in request.app.state.body_observers:
        observe(request, raw, value)


def note_ignored(request: Request, *names: str) -> None:
    """List fields as ignored in the response header. `names` never come from a caller.

    For fields that `ignored_in` cannot find; call it before the response is returned.
    """
    noted = getattr(request.state, "ignored", ())
    request.state.ignored = tuple(dict.fromkeys((*noted, *names)))


def _with_ignored(request: Request, response: Response) -> Response:
    if noted := getattr(request.state, "ignored", ()):
        response.headers[IGNORED_HEADER] = ", ".join(noted)
    return response


class _Parsed(Request):
    """A request whose body was already read and parsed, possibly validated."""

    def __init__(self, request: Request, raw: bytes, value: Any) -> None:
        super().__init__(_with_json_type(request.scope), request.receive)
        self._raw = raw
        self._value = value

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._value


def _with_json_type(scope: Scope) -> Scope:
    """Return the scope with JSON as its content type."""
    if _media_type(Headers(scope=scope)) == _JSON:
        return scope
    headers = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}


async def read_body(
    request: Request, max_bytes: int, *, timeout_s: float = BODY_TIMEOUT_S
) -> bytes:
    """Read the whole body. Raises the errors of `receive_body`."""
    body = bytearray()
    await receive_body(request, body.extend, max_bytes, timeout_s=timeout_s)
    return bytes(body)


async def receive_body(
    request: Request,
    take: Callable[[bytes], object],
    max_bytes: int,
    *,
    timeout_s: float = BODY_TIMEOUT_S,
) -> None:
    """Pass the body to `take`, piece by piece as it arrives.

    Raises `PayloadTooLarge` over `max_bytes`, `RequestTimeout` if it is late, and errors of `take`.
    """
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or len(declared) > 20 or int(declared) > max_bytes:
        raise body_too_large(max_bytes)
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            more = True
            while more:
                message = await request.receive()
                piece = message.get("body", b"")
                more = message.get("more_body", False)
                num_bytes += len(piece)
                if num_bytes > max_bytes:
                    raise body_too_large(max_bytes)
                take(piece)
    except TimeoutError as error:
        raise RequestTimeout(
            f"The body did not arrive within {timeout_s:g} s; send it faster."
        ) from error


def parse_json(raw: bytes) -> Any:
    """Parse strict JSON. Raises `InvalidRequest` with the cause."""
    _check_structure(raw)
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
        if _SURROGATE_ESCAPE.search(raw):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise InvalidRequest("The body contains a lone surrogate or is not UTF-8.") from error
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"The body is not valid JSON: {error.msg} at character {error.pos}."
        ) from error
    except InvalidRequest:
        raise
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits
        raise InvalidRequest("The body contains a number that is too long.") from error
    return value


def check_not_compressed(request: Request) -> None:
    """Raise `UnsupportedMedia` for a compressed body."""
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMedia("Compressed bodies are not accepted; send the body uncompressed.")


def _check_media_type(request: Request) -> None:
    if _media_type(request.headers) != _JSON:
        raise UnsupportedMedia("Send the body as JSON, with 'Content-Type: application/json'.")


def _media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _check_structure(raw: bytes) -> None:
    """Check depth and number of containers by removing bracket pairs, the innermost first."""
    brackets, end = b"", 0
    while stretch := _STRETCH.match(raw, end):
        brackets += _STRING.sub(b"", stretch[0]).translate(None, _NOT_BRACKETS)
        end = stretch.end()
    if len(brackets) > 2 * MAX_JSON_CONTAINERS:
        raise InvalidRequest(
            f"The body contains more than {MAX_JSON_CONTAINERS} objects and arrays."
        )
    for _ in range(MAX_JSON_DEPTH):
        peeled = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(peeled) == len(brackets):
            break
        brackets = peeled
    if brackets:
        raise InvalidRequest(
            f"The body is not valid JSON, or nested more than {MAX_JSON_DEPTH} levels deep."
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_JSON_FIELDS:
        raise InvalidRequest(f"An object in the body has more than {MAX_JSON_FIELDS} fields.")
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in fields if names.count(name) > 1)[:80]
        raise InvalidRequest(f"Duplicate field {twice!a}.", param=ascii(twice)[1:-1])
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"{name} is not a JSON number.")


def body_too_large(max_bytes: int) -> PayloadTooLarge:
    """Return the error for a body over `max_bytes`."""
    return PayloadTooLarge(f"The body is larger than the limit of {max_bytes} bytes.")
