"""Streams of JSON documents: server-sent events as in OpenAI's API, and JSON lines.

Owns the frames: one document per `data:` line or per line, an error frame when the stream breaks,
and heartbeats while it is silent. Knows no document: the route also decides whether `[DONE]` or a
document ends the stream.
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
    """A document that is already encoded as JSON."""

    json_line: bytes


class EventStream(Response):
    """Streams documents as they arrive.

    The response starts with the first document or the first heartbeat: an earlier error is sent
    with its HTTP status, a later one is the last frame. The documents are always closed, which
    cancels their jobs. `end` are the bytes after the last document, `heartbeat` those sent during
    silence. If `is_named`, events are named by the `type` of their documents.
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
        except Exception as error:  # headers are sent: only a frame reaches the client
            if not writer.has_started:
                raise
            log_broken(error, scope)
            await writer.write(self._frame(self._last_words(error, scope)))
        finally:
            heart.cancel()
        await writer.end()

    async def _written(self, document: BaseModel) -> BaseModel:
        """Hook for subclasses: may replace a long document by a `WrittenDocument`."""
        return document

    def _last_words(self, error: BaseException, scope: Scope) -> BaseModel:
        """Return the last document of a stream that fails."""
        return error_document(error, scope)

    def _frame(self, document: BaseModel) -> bytes:
        name = getattr(document, "type", "") if self._is_named else ""
        event = f"event: {name}\n" if name else ""
        return f"{event}data: ".encode() + _json_line(document) + b"\n\n"


class LineStream(EventStream):
    """Streams one document per line, without heartbeats."""

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
    """Sends frames of one stream from two tasks: documents and heartbeat."""

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
        """Write `heartbeat` after every `interval_s` of silence."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._last_s + interval_s - clock()))
            if clock() >= self._last_s + interval_s:
                await self.write(heartbeat)


def described(*documents: type[BaseModel], error: type[BaseModel] = ErrorBody) -> dict[str, Any]:
    """Return the OpenAPI `content` of a stream of `documents`, with `error` and `[DONE]`.

    Schemas are inlined: the document holds components only for responses that are not streams.
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
    """Return the OpenAPI `content` of a stream of JSON lines."""
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
    """Log the reason why a stream broke, with the traceback of internal errors."""
    extra = fields(request_id=scope["state"]["request_id"])
    if to_public(error) is error:
        _logger.warning("stream ended with %s", type(error).__name__, extra=extra)
    else:
        _logger.error("stream failed", exc_info=error, extra=extra)
