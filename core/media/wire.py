"""Messages between a pool and its decode children, over a socket pair.

Owns the messages and their framing: four bytes of length, msgpack, and raw bytes announced by some
messages. Both ends limit lengths.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from triptych.core.errors import ErrorInfo
from triptych.core.process.typed import decode_msgpack

_LENGTH: Final = struct.Struct(">I")
_MAX_MESSAGE_BYTES: Final = 64 * 1024
_CHECK_EVERY_S: Final = 0.5
MAX_SETUP_BYTES: Final = 4 * 2**20
_Message = TypeVar("_Message")


class Setup(msgspec.Struct, frozen=True):
    """Sent to the child once: the modules to serve, and the memory one request may take.

    `args` are passed to the `prepare` function of each module.
    """

    modules: tuple[str, ...]
    memory_bytes: int
    args: dict[str, Any] = {}
    niceness: int = 0


class DecoderReady(msgspec.Struct, frozen=True):
    """Sent by the child once the modules are imported and the limits set."""


class Call(msgspec.Struct, frozen=True):
    """Sent to the child: run a function on the `num_bytes` that follow, for at most `cpu_s`."""

    name: str
    args: dict[str, Any]
    num_bytes: int
    cpu_s: int


class DecodedChunk(msgspec.Struct, frozen=True, tag=True):
    """Sent by the child, any number of times: `num_bytes` of the result follow."""

    num_bytes: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """Sent by the child after the function returned."""

    value: Any = None


class DecodeFailed(msgspec.Struct, frozen=True, tag=True):
    """Sent by the child after an error. `detail` is for the log; empty for expected errors."""

    error: ErrorInfo
    detail: str = ""


Reply = DecodedChunk | Done | DecodeFailed
_DECODE_REPLY: Final = msgspec.msgpack.Decoder(Reply).decode


class Line:
    """One end of the connection. Calls raise EOFError or OSError once the other end is closed.

    Calls that do not finish by `deadline_s` (of the monotonic clock) raise TimeoutError. During a
    wait, `on_wait` is called twice per second; an exception from it ends the wait.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.deadline_s: float | None = None
        self.on_wait: Callable[[], None] | None = None

    def send(self, message: msgspec.Struct, data: bytes | bytearray | memoryview = b"") -> None:
        """Send `message`, and the `data` that it announces."""
        packed = msgspec.msgpack.encode(message)
        self._send_all(_LENGTH.pack(len(packed)) + packed)
        self._send_all(data)

    def receive(self, kind: type[_Message], *, max_bytes: int = _MAX_MESSAGE_BYTES) -> _Message:
        """The next message. Raises `msgspec.MsgspecError` if it is not a `kind`."""
        return decode_msgpack(self._packed(max_bytes), kind)

    def receive_reply(self) -> Reply:
        """The next reply. Raises `msgspec.MsgspecError` for other messages."""
        reply: Reply = _DECODE_REPLY(self._packed(_MAX_MESSAGE_BYTES))
        return reply

    def _packed(self, max_bytes: int) -> bytearray:
        (num_bytes,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if num_bytes > max_bytes:
            raise msgspec.DecodeError("a message is too long")
        return self.read(num_bytes)

    def read(self, num_bytes: int) -> bytearray:
        """Read the next `num_bytes` bytes."""
        data = bytearray(num_bytes)
        self.fill(memoryview(data))
        return data

    def fill(self, view: memoryview) -> None:
        """Read until `view` is full."""
        while view:
            num_bytes = self._retry_until_ready(self._end.recv_into, view)
            if not num_bytes:
                raise EOFError("the other end is closed")
            view = view[num_bytes:]

    def close(self) -> None:
        """Close this end, which the other end notices."""
        self._end.close()

    def _send_all(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[self._retry_until_ready(self._end.send, view) :]

    def _retry_until_ready(self, move: Callable[[memoryview], int], view: memoryview) -> int:
        """Wait until some bytes of `view` could be moved; returns their number."""
        while True:
            self._end.settimeout(self._wait_s())
            try:
                return move(view)
            except TimeoutError:
                if self.on_wait is not None:
                    self.on_wait()

    def _wait_s(self) -> float | None:
        """Seconds to wait before the next check of the deadline and `on_wait`."""
        most_s = None if self.on_wait is None else _CHECK_EVERY_S
        if self.deadline_s is None:
            return most_s
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        return left_s if most_s is None else min(left_s, most_s)
