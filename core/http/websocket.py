"""WebSockets: messages in both directions over a connection that began as an HTTP request.

Owns the handshake, the messages of one socket, their limits, pings, and the closing. Frames are
parsed by `websockets`, without its I/O. For all layers before the route a socket is a GET request:
keys are checked before it opens, its response has status 101 and ends with it. Knows no content:
the route writes the last message of a socket that fails. Messages are not compressed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from websockets.exceptions import PayloadTooBig
from websockets.frames import Frame, Opcode
from websockets.http11 import Request as Handshake
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from triptych.core.errors import (
    InvalidRequest,
    PayloadTooLarge,
    RequestTimeout,
    SlowReader,
    TriptychError,
    UpgradeRequired,
)
from triptych.core.http.disconnect import DisconnectWatcher
from triptych.core.http.errors import to_public
from triptych.core.http.sse import log_broken
from triptych.core.http.upgrade import Upgrade, Wire

_frames_log = logging.getLogger(f"{__name__}.frames")
_frames_log.setLevel(logging.WARNING)  # below, it has the content of messages
_CLOSE_S = 2.0  # for the client to answer a closing frame
_WRITE_BYTES = 2**20  # unread bytes from which the writer waits
_LEAST_RATE = 4096  # bytes per second that a client reads while the writer waits: speech has more
_UNREAD_BYTES = 2**24  # of answers to pings, too, which no caller awaits
_NORMAL, _BAD_DATA, _TOO_BIG, _POLICY, _INTERNAL, _AGAIN = 1000, 1007, 1009, 1008, 1011, 1013


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketLimits:
    """Limits of one socket: a message, unread messages, and times in seconds.

    A client that hardly reads for `stall_s`, answers no ping for `ping_s`, or sends no message for
    `idle_s` is disconnected.
    """

    message_bytes: int
    num_queued: int = 64
    ping_s: float = 20.0
    stall_s: float = 30.0
    idle_s: float = 600.0


class SocketClosed(Exception):
    """The socket is closed: the client left, or got the reason."""


LastWords = Callable[[TriptychError], str]
"""Formats an error as the last message of a socket."""


class WebSocket:
    """One socket, from the request to its end."""

    def __init__(self, limits: SocketLimits, last_words: LastWords, subprotocol: str = "") -> None:
        protocols = [Subprotocol(subprotocol)] if subprotocol else None
        self._conn = ServerProtocol(
            max_size=limits.message_bytes,
            logger=_frames_log,
            subprotocols=protocols,
            select_subprotocol=lambda _, offered: (
                protocols[0] if protocols and protocols[0] in offered else None
            ),
        )
        self._limits = limits
        self._last_words = last_words
        self._wire: Wire | None = None
        self._parts = bytearray()
        self._is_text = True
        self._messages: deque[tuple[str | bytes, int]] = deque()  # each with its size
        self._num_queued_bytes = 0
        self._arrived = asyncio.Event()
        self._is_broken = False
        self._is_over = False  # no more messages
        self._gone = asyncio.Event()  # the client has agreed to close, or left
        self._is_alive = True  # since the last ping

    # -- the handshake ---------------------------------------------------------------------------

    def accept(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response that opens the socket. Raises `InvalidRequest`."""
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        lines = [b"GET " + scope["raw_path"] + query + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in scope["headers"]]
        self._conn.receive_data(b"\r\n".join([*lines, b"", b""]))
        (request,) = self._conn.events_received() or (None,)
        response = self._conn.accept(request) if isinstance(request, Handshake) else None
        if response is None or response.status_code != 101:
            error = self._conn.handshake_exc or self._conn.parser_exc
            raise InvalidRequest(f"The WebSocket cannot be opened: {error}.")
        self._conn.send_response(response)
        self._conn.data_to_send()  # the HTTP layer writes the head
        return [(name.lower().encode(), value.encode()) for name, value in response.headers.items()]

    def connect(self, upgrade: Upgrade) -> None:
        """Begin to read. The head of the response has been sent."""
        self._wire = upgrade.connect(self)
        low = (
            _WRITE_BYTES - 2**16
        )  # a client at the pace of speech takes seconds for the difference
        self._wire.transport.set_write_buffer_limits(_WRITE_BYTES, low)

    # -- from the connection ---------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client."""
        self._is_alive = True
        self._conn.receive_data(data)
        for event in self._conn.events_received():
            assert isinstance(event, Frame)
            if event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                self._add(event)
            elif event.opcode is Opcode.CLOSE:
                self.connection_lost()
        if self._conn.parser_exc is not None and not self._is_broken:
            self._break_off(self._conn.parser_exc)
        self._flush()
        self._set_reading()

    def connection_lost(self) -> None:
        """Note the end of the connection."""
        self._gone.set()
        self._end()

    def _end(self) -> None:
        self._is_over = True
        self._arrived.set()

    def _add(self, frame: Frame) -> None:
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        self._parts += frame.data
        if not frame.fin or self._conn.state is not State.OPEN:
            return
        data, self._parts = bytes(self._parts), bytearray()
        try:
            self._messages.append((data.decode() if self._is_text else data, len(data)))
        except UnicodeDecodeError:
            self._write_error(InvalidRequest("A text message is not UTF-8."), _BAD_DATA)
            self._end()
            return
        self._num_queued_bytes += len(data)
        self._arrived.set()

    def _break_off(self, cause: Exception) -> None:
        """End a socket whose frames cannot be parsed; the parser has prepared the closing frame."""
        if isinstance(cause, PayloadTooBig):
            error: TriptychError = PayloadTooLarge(
                f"A message is larger than the limit of {self._limits.message_bytes} bytes."
            )
        else:
            error = InvalidRequest(f"The frames of the WebSocket are malformed: {cause}.")
        self._write(Frame(Opcode.TEXT, self._last_words(error).encode()).serialize(mask=False))
        self._is_broken = True
        self._end()

    def _set_reading(self) -> None:
        """Read no more while enough messages wait."""
        if self._wire is None or self._wire.transport.is_closing():
            return
        is_full = len(self._messages) >= self._limits.num_queued
        is_full |= self._num_queued_bytes >= self._limits.message_bytes
        if is_full and not self._is_over:
            self._wire.transport.pause_reading()
        else:
            self._wire.transport.resume_reading()

    # -- for the route ---------------------------------------------------------------------------

    async def receive(self) -> str | bytes:
        """Return the next message. Raises `SocketClosed`, or `RequestTimeout` after `idle_s`."""
        try:
            async with asyncio.timeout(self._limits.idle_s):
                while not self._messages:
                    if self._is_over:
                        raise SocketClosed
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError as error:
            raise RequestTimeout(
                f"No message came within {self._limits.idle_s:g} s; open a new session."
            ) from error
        message, num_bytes = self._messages.popleft()
        self._num_queued_bytes -= num_bytes
        self._set_reading()
        return message

    async def send(self, message: str | bytes) -> None:
        """Send a message. Raises `SocketClosed`, or `SlowReader` if the client stops reading."""
        if self._is_over or self._conn.state is not State.OPEN:
            raise SocketClosed
        if isinstance(message, str):
            self._conn.send_text(message.encode())
        else:
            self._conn.send_binary(message)
        self._flush()
        await self._drain()

    async def _drain(self) -> None:
        """Wait until few bytes are unread: sound may be read no sooner than it is played."""
        assert self._wire is not None
        stall_s = self._limits.stall_s
        while True:
            num_unread = self._wire.transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(stall_s):
                    return await self._wire.drain()
            except TimeoutError as error:
                num_read = num_unread - self._wire.transport.get_write_buffer_size()
                if num_read < stall_s * _LEAST_RATE:
                    raise SlowReader(
                        f"The client hardly read for {stall_s:g} s; read events as they come."
                    ) from error

    async def keep_alive(self) -> None:
        """Send pings until the client stops answering; then the connection is cut."""
        while not self._gone.is_set():
            await asyncio.sleep(self._limits.ping_s)
            if self._wire is None or not self._wire.transport.is_reading():
                continue  # its answer may be among the bytes that are not read yet
            if not self._is_alive:
                self._wire.transport.abort()
                return
            if self._conn.state is State.OPEN:
                self._is_alive = False
                self._conn.send_ping(b"")
                self._flush()

    async def close(self, code: int = _NORMAL, reason: str = "") -> None:
        """Close the socket, and wait briefly for the client to agree."""
        if self._conn.state is State.OPEN:
            self._conn.send_close(code, reason)
            self._flush()
        self._messages.clear()
        self._num_queued_bytes = 0
        self._set_reading()
        if self._is_broken and self._wire is not None:  # its answer is not parsed any more
            with suppress(OSError):
                if self._wire.transport.can_write_eof():  # not over TLS
                    self._wire.transport.write_eof()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._gone.wait()
        except TimeoutError:  # it may read nothing, and what is unsent would keep the connection
            if self._wire is not None:
                self._wire.transport.abort()

    async def fail(self, error: TriptychError) -> None:
        """Tell the client an error, and close the socket."""
        self._write_error(error, _code_of(error))
        await self.close()

    def _write_error(self, error: TriptychError, code: int) -> None:
        if self._conn.state is State.OPEN:
            self._conn.send_text(self._last_words(error).encode())
            self._conn.send_close(code, error.code)
            self._flush()

    def _flush(self) -> None:
        self._write(b"".join(self._conn.data_to_send()))

    def _write(self, data: bytes) -> None:
        if self._wire is None or self._wire.transport.is_closing():
            return
        self._wire.transport.write(data)
        if self._wire.transport.get_write_buffer_size() > _UNREAD_BYTES:
            self._wire.transport.abort()


class WebSocketResponse(Response):
    """The response that turns a request into a socket, and lasts as long as `serve` does.

    Errors of `serve` are sent to the client with `last_words`, and end the socket. The client's
    leaving cancels nothing: `receive` and `send` raise `SocketClosed`.
    """

    def __init__(
        self,
        serve: Callable[[WebSocket], Awaitable[None]],
        limits: SocketLimits,
        last_words: LastWords,
        subprotocol: str = "",
    ) -> None:
        super().__init__(status_code=101)
        self._serve = serve
        self._socket = WebSocket(limits, last_words, subprotocol)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open the socket and serve it. Raises `UpgradeRequired` for an ordinary request."""
        watcher: DisconnectWatcher = scope["state"]["watcher"]
        upgrade: Upgrade | None = scope["state"].get("upgrade")
        if upgrade is None:
            raise UpgradeRequired("This route is a WebSocket: open it with ws:// or wss://.")
        headers = self._socket.accept(scope)
        watcher.lift_limit()
        await send({"type": "http.response.start", "status": 101, "headers": headers})
        self._socket.connect(upgrade)
        pinging = asyncio.create_task(self._socket.keep_alive())
        try:
            await self._run(scope, watcher)
        finally:
            pinging.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _run(self, scope: Scope, watcher: DisconnectWatcher) -> None:
        try:
            with suppress(SocketClosed):
                await self._serve(self._socket)
            await self._socket.close()
        except asyncio.CancelledError:
            reason = watcher.take_reason()
            if reason is None:
                raise
            await self._socket.fail(reason)
        except Exception as error:  # the head is sent: only a message reaches the client
            log_broken(error, scope)
            await self._socket.fail(to_public(error))


def _code_of(error: TriptychError) -> int:
    """Return the code of the closing frame for an error."""
    if error.status >= 500:
        return _AGAIN if error.status == 503 else _INTERNAL
    return _TOO_BIG if isinstance(error, PayloadTooLarge) else _POLICY
