"""Streams of JSON documents: server-sent events as OpenAI sends them, and bare lines.

Owns the frames: one document per `data:` line or per line, an error frame when the stream breaks,
what is sent while it is silent. What is in a document is the route's, and whether `[DONE]` or a
document of its own kind ends the stream.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cache
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych.core.http.disconnect import DisconnectWatcher
from triptych.core.http.errors import ErrorBody, error_document, to_public
from triptych.core.process.logs import fields
from triptych.core.text.json_lines import escape_line_ends

_DONE = "[DONE]"
DONE = f"data: {_DONE}\n\n".encode()
HEARTBEAT = b": waiting\n\n"

_logger = logging.getLogger(__name__)


class WrittenDocument(BaseModel):
    """A document as JSON, where that was written elsewhere: nothing else of it is sent."""

    json_line: bytes


class EventStream(Response):
    """Streams documents as they come.

    The answer starts with the first document, or with the first heartbeat if that is sooner: an
    error before either has the HTTP status it deserves, one after is the last frame. The stream
    of documents is closed whatever happens, which cancels the jobs behind it. `end` are the bytes
    after the last document, `heartbeat` those of a silence. Where `is_named`, events bear the
    `type` of their documents as a name.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        documents: AsyncGenerator[BaseModel, None],
        *,
        heartbeat_s: float,
        end: bytes = DONE,
        heartbeat: bytes = HEARTBEAT,
        is_named: bool = False,
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers.update({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._documents = documents
        self._heartbeat_s = heartbeat_s
        self._end = end
        self._heartbeat = heartbeat
        self._is_named = is_named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        watcher: DisconnectWatcher = scope["state"]["watcher"]
        writer = _Writer(send, self.raw_headers)
        if scope["state"].get("is_head"):
            await self._documents.aclose()
            await writer.end()
            return
        heart = asyncio.create_task(writer.beat(self._heartbeat, self._heartbeat_s))
        try:
            async with aclosing(self._documents) as documents:
                async for document in documents:
                    await writer.write(self._frame(await self._written(document)))
            if self._end:
                await writer.write(self._end)
        except asyncio.CancelledError:
            reason = watcher.take_reason() if writer.has_started else None
            if reason is None:
                raise
            await writer.write(self._frame(self._last_words(reason, scope)))
        except Exception as error:  # the answer has begun: only a frame reaches the client
            if not writer.has_started:
                raise
            log_broken(error, scope)
            await writer.write(self._frame(self._last_words(error, scope)))
        finally:
            heart.cancel()
        await writer.end()

    async def _written(self, document: BaseModel) -> BaseModel:
        """The document; one that takes long to write, as a `WrittenDocument`."""
        return document

    def _last_words(self, error: BaseException, scope: Scope) -> BaseModel:
        """The last document of a stream that breaks off."""
        return error_document(error, scope)

    def _frame(self, document: BaseModel) -> bytes:
        name = getattr(document, "type", "") if self._is_named else ""
        event = f"event: {name}\n" if name else ""
        return f"{event}data: ".encode() + _json_line(document) + b"\n\n"


class LineStream(EventStream):
    """Streams documents a line each, with nothing in a silence: a line is a document."""

    media_type = "application/x-ndjson"

    def __init__(self, documents: AsyncGenerator[BaseModel, None]) -> None:
        super().__init__(documents, heartbeat_s=math.inf, end=b"")

    def _frame(self, document: BaseModel) -> bytes:
        return _json_line(document) + b"\n"


def _json_line(document: BaseModel) -> bytes:
    if isinstance(document, WrittenDocument):
        return escape_line_ends(document.json_line)
    return escape_line_ends(document.model_dump_json(exclude_unset=True).encode())


class _Writer:
    """Sends frames of one stream, from two tasks: the documents, and the heartbeat."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self._lock = asyncio.Lock()
        self._last_s = asyncio.get_running_loop().time()
        self.has_started = False

    async def write(self, frame: bytes) -> None:
        async with self._lock:
            await self._start()
            await self._send({"type": "http.response.body", "body": frame, "more_body": True})
            self._last_s = asyncio.get_running_loop().time()

    async def end(self) -> None:
        await self._start()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self) -> None:
        if not self.has_started:
            self.has_started = True
            start = {"type": "http.response.start", "status": 200, "headers": self._headers}
            await self._send(start)

    async def beat(self, heartbeat: bytes, interval_s: float) -> None:
        """Write `heartbeat` whenever `interval_s` went by in silence."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._last_s + interval_s - clock()))
            if clock() >= self._last_s + interval_s:
                await self.write(heartbeat)


def described(*documents: type[BaseModel], error: type[BaseModel] = ErrorBody) -> dict[str, Any]:
    """A stream of `documents` in OpenAPI's words, for the `content` of an answer.

    An `error` may be among them, and the word for the end. Their schemas stand there whole: only
    those of answers in one piece are found by reference.
    """
    schemas = [_whole_schema(kind) for kind in (*documents, error)]
    document = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": schemas},
    }
    data = {"anyOf": [{"const": _DONE}, document]}
    properties = {"event": {"type": "string"}, "data": data}
    event = {"type": "object", "properties": properties, "required": ["data"]}
    return {"text/event-stream": {"itemSchema": event}}


def described_lines(document: type[BaseModel], error: type[BaseModel]) -> dict[str, Any]:
    """A stream of lines in OpenAPI's words, for the `content` of an answer."""
    schemas = [_whole_schema(kind) for kind in (document, error)]
    return {LineStream.media_type: {"itemSchema": {"anyOf": schemas}}}


@cache
def _whole_schema(document: type[BaseModel]) -> Any:
    schema = document.model_json_schema(mode="serialization")
    parts = schema.pop("$defs", {})

    def whole(node: Any) -> Any:
        if isinstance(node, list):
            return [whole(entry) for entry in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return whole(parts[node["$ref"].rpartition("/")[2]])
        return {key: whole(value) for key, value in node.items()}

    return whole(schema)


def log_broken(error: BaseException, scope: Scope) -> None:
    """Log why a stream ended in its middle: our own faults with everything known of them."""
    extra = fields(request_id=scope["state"]["request_id"])
    if to_public(error) is error:
        _logger.warning("stream ended with %s", type(error).__name__, extra=extra)
    else:
        _logger.error("stream failed", exc_info=error, extra=extra)
