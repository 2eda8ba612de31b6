"""The switch of an HTTP connection to another protocol (status 101).

Owns the bytes of the connection from the response's head to its end. For every layer the request is
an ordinary one whose response lasts as long as the connection. Knows no other protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.types import Message, Scope, Send

_HEAD = b"HTTP/1.1 101 Switching Protocols"


class ByteSink(Protocol):
    """The receiver of a connection's bytes after the switch."""

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client."""
        ...

    def connection_lost(self) -> None:
        """Note that no more bytes come or go."""
        ...


@dataclass(frozen=True, slots=True)
class Wire:
    """The two directions of a connection; `drain` waits until the client reads what was written."""

    transport: asyncio.Transport
    drain: Callable[[], Awaitable[None]]


class Upgrade:
    """A request that asks for another protocol. Replaces `send` of its cycle.

    A response other than 101 is sent as usual, and the connection then closes: bytes that a client
    sent ahead of the answer are in no protocol that was agreed on.
    """

    def __init__(self, cycle: Any, wire: Wire) -> None:
        self._cycle = cycle
        self._wire = wire
        self._send: Send = cycle.send
        self._sink: ByteSink | None = None
        self.is_open = False
        cycle.send = self.send
        cycle.keep_alive = False

    def connect(self, sink: ByteSink) -> Wire:
        """Pass the bytes of the client to `sink` from now on. The head was sent before."""
        assert self.is_open
        self._sink = sink
        if self._cycle.disconnected:
            sink.connection_lost()
        return self._wire

    def data_received(self, data: bytes) -> bool:
        """Pass on bytes after the switch; returns whether it has taken place."""
        if self._sink is not None:
            self._sink.data_received(data)
        return self.is_open

    def connection_lost(self) -> None:
        """Pass on the end of the connection."""
        if self._sink is not None:
            self._sink.connection_lost()

    async def send(self, message: Message) -> None:
        """Send a message of the response; the end of its body closes the connection."""
        if message["type"] == "http.response.start" and message["status"] == 101:
            self.is_open = True
            self._cycle.response_started = True
            self._write_head(message["headers"])
        elif not self.is_open:
            await self._send(message)
        elif not message.get("more_body", False):
            self._cycle.response_complete = True
            self._wire.transport.close()

    def _write_head(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        lines = [_HEAD, *(name + b": " + value for name, value in headers)]
        if not self._wire.transport.is_closing():
            self._wire.transport.write(b"\r\n".join([*lines, b"", b""]))


def asks_for_websocket(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request's headers (names in lower case) ask for a WebSocket."""
    values = {name: value.lower() for name, value in headers}
    is_upgrade = b"upgrade" in values.get(b"connection", b"")
    return is_upgrade and values.get(b"upgrade", b"").strip() == b"websocket"


def offered_subprotocols(scope: Scope) -> list[str]:
    """Return the subprotocols that a client offers, in its order."""
    lists = Headers(scope=scope).getlist("sec-websocket-protocol")
    return [name.strip() for each in lists for name in each.split(",")]
