"""The messages between a pool and its decode children, over a socket pair.

Owns the messages and their framing: four bytes of length, msgpack, and the raw bytes that some
messages announce. Neither end trusts a length beyond its cap.
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
_LOOK_EVERY_S: Final = 0.5
MAX_SETUP_BYTES: Final = 4 * 2**20
_Message = TypeVar("_Message")


class Setup(msgspec.Struct, frozen=True):
    """Down, once: the modules whose functions are served, and the memory one request may take.

    `args` are what the modules prepare themselves with.
    """

    modules: tuple[str, ...]
    memory_bytes: int
    args: dict[str, Any] = {}
    niceness: int = 0


class DecoderReady(msgspec.Struct, frozen=True):
    """Up, once: the modules are imported and the limits stand."""


class Call(msgspec.Struct, frozen=True):
    """Down: run a function on the `num_bytes` that follow, for at most `cpu_s` of work."""

    name: str
    args: dict[str, Any]
    num_bytes: int
    cpu_s: int


class DecodedChunk(msgspec.Struct, frozen=True, tag=True):
    """Up, any number: `num_bytes` of the result follow."""

    num_bytes: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """Up: the function returned."""

    value: Any = None


class DecodeFailed(msgspec.Struct, frozen=True, tag=True):
    """Up: the function raised. `detail` is for the log; empty where the error was meant."""

    error: ErrorInfo
    detail: str = ""


Reply = DecodedChunk | Done | DecodeFailed
_DECODE_REPLY: Final = msgspec.msgpack.Decoder(Reply).decode


class Line:
    """One end. Every call raises EOFError or OSError once the other end is gone.

    Calls that are not over by `deadline_s` (of the monotonic clock) raise TimeoutError. While one
    waits, `look` is called twice a second; what it raises ends the wait.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.deadline_s: float | None = None
        self.look: Callable[[], None] | None = None

    def send(self, message: msgspec.Struct, data: bytes | bytearray | memoryview = b"") -> None:
        """Send `message`, and the `data` that it announces."""
        packed = msgspec.msgpack.encode(message)
        self._send_all(_LENGTH.pack(len(packed)) + packed)
        self._send_all(data)

    def receive(self, kind: type[_Message], *, max_bytes: int = _MAX_MESSAGE_BYTES) -> _Message:
        """The next message. Raises `msgspec.MsgspecError` for what is not `kind`."""
        return decode_msgpack(self._packed(max_bytes), kind)

    def receive_reply(self) -> Reply:
        """The next reply. Raises `msgspec.MsgspecError` for what is none."""
        reply: Reply = _DECODE_REPLY(self._packed(_MAX_MESSAGE_BYTES))
        return reply

    def _packed(self, max_bytes: int) -> bytearray:
        (num_bytes,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if num_bytes > max_bytes:
            raise msgspec.DecodeError("a message is too long")
        return self.read(num_bytes)

    def read(self, num_bytes: int) -> bytearray:
        """The next `num_bytes`."""
        data = bytearray(num_bytes)
        self.fill(memoryview(data))
        return data

    def fill(self, view: memoryview) -> None:
        """Read until `view` is full."""
        while view:
            num_bytes = self._patiently(self._end.recv_into, view)
            if not num_bytes:
                raise EOFError("the other end is closed")
            view = view[num_bytes:]

    def close(self) -> None:
        """Report to the other end that this one is done."""
        self._end.close()

    def _send_all(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[self._patiently(self._end.send, view) :]

    def _patiently(self, move: Callable[[memoryview], int], view: memoryview) -> int:
        """How many bytes of `view` were moved, once some could be."""
        while True:
            self._end.settimeout(self._wait_s())
            try:
                return move(view)
            except TimeoutError:
                if self.look is not None:
                    self.look()

    def _wait_s(self) -> float | None:
        """How long to wait before the clock and the other end are looked at."""
        most_s = None if self.look is None else _LOOK_EVERY_S
        if self.deadline_s is None:
            return most_s
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        return left_s if most_s is None else min(left_s, most_s)
