"""One HTTP connection with the limits that uvicorn lacks.

Owns the limits of a request's size and speed on the wire, and of idle and lingering connections.
Knows no request: complete ones go to uvicorn and the app.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from triptych.core import limits
from triptych.core.errors import (
    HeadersTooLarge,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
    TriptychError,
)
from triptych.core.http.dialects import Dialect, dialect_of
from triptych.core.http.errors import OPENAI, error_response
from triptych.core.http.upgrade import Upgrade, Wire, asks_for_websocket


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """Limits of one connection and of all connections."""

    head_bytes: int = limits.MAX_HEAD_BYTES
    num_headers: int = limits.MAX_HEADERS
    framing_bytes: int = limits.MAX_FRAMING_BYTES
    discarded_bytes: int = limits.MAX_DISCARDED_BYTES
    num_requests: int = limits.MAX_REQUESTS_PER_CONNECTION
    num_connections: int = limits.MAX_CONNECTIONS
    head_timeout_s: float = limits.HEAD_TIMEOUT_S
    body_timeout_s: float = limits.BODY_TIMEOUT_S + 5.0  # the app answers 408 before
    linger_s: float = 30.0
    """How long a complete response may remain unread."""
    discarding_s: float = 5.0
    """How long incoming bytes are read after a refusal, so that the client receives it."""


class _DeferredClose:
    """The transport as a uvicorn cycle sees it: `close` may wait for the request's body."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 connection, guarded against clients that send too slowly or too much.

    One timer limits the head and then the body of a request, another the reading of the response.
    Closing a connection with unread bytes resets it, and the client may lose the response:
    remaining bytes are first read and discarded, within limits. Refusals have the format of the
    request's API: one of `dialects`, or OpenAI's.
    """

    def __init__(
        self, *, wire: WireLimits, dialects: Sequence[Dialect] = (), **uvicorn_parts: Any
    ) -> None:
        super().__init__(**uvicorn_parts)
        self._wire = wire
        self._dialects = dialects
        self.url = b""
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._is_in_head = False
        self._is_in_body = False
        self._closes_after_body = False  # close once the body has arrived
        self._is_discarding = False  # closing soon: incoming bytes are no longer parsed
        self._num_overhead_bytes = 0  # bytes of this request that are not body
        self._num_discarded_bytes = 0
        self._num_requests = 0
        self._refusal: TriptychError | None = None
        self._upgrade: Upgrade | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first head, or refuse a connection over the limit."""
        super().connection_made(transport)
        self._arm(self._wire.head_timeout_s, self._on_late_head)
        if len(self.connections) > self._wire.num_connections:
            self._refuse(Overloaded("The server has too many connections open."))
            transport.close()  # over the limit: it may not linger

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._disarm()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        super().connection_lost(exc)
        if self._upgrade is not None:
            self._upgrade.connection_lost()

    def data_received(self, data: bytes) -> None:
        """Parse the data, and count the bytes that are not body."""
        if self._upgrade is not None and self._upgrade.data_received(data):
            return
        if self.transport.is_closing():
            return
        if self._is_discarding or self._upgrade is not None:
            self._discard(len(data))
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if self._timer is None and is_idle:  # first bytes on a kept-alive connection
            self._arm(self._wire.head_timeout_s, self._on_late_head)
        self._num_overhead_bytes += len(data)
        super().data_received(data)
        if self._num_overhead_bytes > self._wire.head_bytes and not self._is_in_body and is_idle:
            self._refuse(self._head_too_large())
        elif self._num_overhead_bytes > self._wire.head_bytes + self._wire.framing_bytes:
            self._refuse(PayloadTooLarge("The body has too many small chunks."))

    def on_message_begin(self) -> None:
        """Give the app a way to close the connection of a client that stopped reading."""
        super().on_message_begin()
        self._is_in_head = True
        self.scope["state"]["abort_connection"] = self.transport.abort

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header of the head; trailers after a chunked body are dropped."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass on a head within the limits; start the timer of the body."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._wire.head_bytes or len(self.headers) > self._wire.num_headers:
            self._refusal = self._head_too_large()
            raise self._refusal  # through the parser to `send_400_response`
        self._check_head()
        self._is_in_head, self._is_in_body = False, True
        self._num_discarded_bytes = 0
        self._num_requests += 1
        self._arm(self._wire.body_timeout_s, self.transport.abort)
        super().on_headers_complete()
        self.cycle.transport = _DeferredClose(self.transport, self._close_after_body)  # type: ignore[assignment]
        if self._num_requests >= self._wire.num_requests:
            self.cycle.keep_alive = False
        if self.parser.get_method() == b"GET" and asks_for_websocket(self.headers):
            self._upgrade = Upgrade(self.cycle, Wire(self.transport, self.flow.drain))
            self.scope["state"]["upgrade"] = self._upgrade

    def _check_head(self) -> None:
        """Refuse heads that HTTP/1 forbids but the parser accepts."""
        version = self.parser.get_http_version()
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if version not in ("1.0", "1.1"):
            self._refusal = InvalidRequest("Unsupported HTTP version; use HTTP/1.1.")
        elif num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
            self._refusal = InvalidRequest("A request needs exactly one Host header.")
        elif any(
            name == b"transfer-encoding" and value.strip().lower() != b"chunked"
            for name, value in self.headers
        ):
            self._refusal = InvalidRequest("The only supported transfer coding is chunked.")
        if self._refusal is not None:
            raise self._refusal

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body, or discard it if the response is complete."""
        self._num_overhead_bytes -= len(body)
        if self.cycle.response_complete:
            self._discard(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timer: the next bytes begin another request."""
        self._is_in_body = False
        self._num_overhead_bytes = 0
        self._disarm()
        super().on_message_complete()
        if self._closes_after_body:
            self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: any client can request an unsupported protocol."""

    def on_response_complete(self) -> None:
        """Limit the time until the response is read and until a started next head is complete."""
        super().on_response_complete()
        self._watch_unread(None)
        if self._is_in_head:
            self._arm(self._wire.head_timeout_s, self._on_late_head)

    def send_400_response(self, msg: str) -> None:
        """Answer an unparsable request in the usual error format."""
        self._refuse(self._refusal or InvalidRequest(msg))

    def _head_too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(
            f"The request's head exceeds {self._wire.head_bytes} bytes or"
            f" {self._wire.num_headers} headers."
        )

    def _on_late_head(self) -> None:
        if self._is_in_head:
            self._refuse(RequestTimeout("The request's head did not arrive in time."))
        else:
            self.transport.close()

    def _refuse(self, error: TriptychError) -> None:
        """Send an error before the app sees the request, and close."""
        if self.transport.is_closing() or self._is_discarding:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if not self._is_in_body or self.pipeline or self.cycle.response_started:
                self.transport.abort()  # another response may be half written
                return
            self.cycle.disconnected = True  # the app waits for the body
            self.cycle.message_event.set()
        request_id = f"req-{uuid.uuid4().hex}"
        dialect = dialect_of(self._partial_scope(), self._dialects, OPENAI)
        response = error_response(error, request_id, dialect)
        response.headers.update(dialect.id_headers(request_id))
        phrase = HTTPStatus(response.status_code).phrase
        lines = [f"HTTP/1.1 {response.status_code} {phrase}".encode(), b"connection: close"]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", response.body]))
        with suppress(OSError):  # already disconnected
            if self.transport.can_write_eof():  # not over TLS
                self.transport.write_eof()
        self._is_discarding = True
        self._num_discarded_bytes = 0
        self._arm(self._wire.discarding_s, self.transport.close)
        self._watch_unread(None)

    def _close_after_body(self) -> None:
        """Close the connection of a complete response once the request's body has arrived."""
        if self._is_in_body and self.cycle.response_complete:
            self._closes_after_body = True
        else:
            self.transport.close()

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded_bytes += num_bytes
        if self._num_discarded_bytes > self._wire.discarded_bytes:
            self.transport.abort()

    def _partial_scope(self) -> dict[str, Any]:
        """Return the scope as far as the head was parsed."""
        path = self.url.partition(b"?")[0].decode("latin-1")
        return {"path": path, "headers": self.headers or []}

    def _watch_unread(self, last_num_bytes: int | None) -> None:
        """Close the connection if its client reads nothing for `linger_s`."""
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes and num_bytes == last_num_bytes:
            self.transport.abort()
        elif num_bytes:
            self._unread_timer = self.loop.call_later(
                self._wire.linger_s, self._watch_unread, num_bytes
            )

    def _arm(self, delay_s: float, action: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(delay_s, action)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
