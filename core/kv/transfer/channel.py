"""Bounded frames on a connected socket.

Owns the framing and the byte counts: four bytes of length, then a message; the bytes of a page
follow its header without a length. Knows no meaning of messages. Belongs to one asyncio loop. A
protocol violation raises `BadPeer`, a lost connection `OSError`.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import msgspec

from triptych.core.kv.transfer.messages import FromDecode, FromPrefill, encode
from triptych.core.process.typed import decode_msgpack

_LENGTH = struct.Struct("<I")
_DESCRIPTOR = b"\1"


class BadPeer(Exception):
    """The other end violated the protocol, or sent nothing for too long."""


class LinkRefused(Exception):
    """The connection was refused; `code` as in `PageRefusal`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class PageChannel:
    """One end of a connection. Frames are sent whole; `counts` gets all bytes."""

    def __init__(self, connected: socket.socket, counts: Counter[str]) -> None:
        self._socket = connected
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()

    async def send(
        self, message: FromPrefill | FromDecode, content: memoryview | None = None
    ) -> None:
        """Send a message, and the bytes of its page."""
        await self.send_frame(encode(message), content)

    async def send_frame(self, frame: bytes, content: memoryview | None = None) -> None:
        """Send an encoded message, and the bytes of its page."""
        parts: list[bytes | memoryview] = [_LENGTH.pack(len(frame)) + frame]
        if content is not None:
            parts.append(content)
        async with self._sending:
            for part in parts:
                await self._loop.sock_sendall(self._socket, part)
                self._counts["page_sent_bytes_total"] += len(part)

    async def receive(self, kind: Any, max_bytes: int) -> Any:
        """Receive the next message, one of the types in `kind`."""
        length = bytearray(_LENGTH.size)
        await self.fill(memoryview(length))
        (num_bytes,) = _LENGTH.unpack(length)
        if not 0 < num_bytes <= max_bytes:
            raise BadPeer(f"a frame of {num_bytes} bytes")
        frame = bytearray(num_bytes)
        await self.fill(memoryview(frame))
        try:
            return decode_msgpack(frame, kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BadPeer(f"a malformed message: {type(error).__name__}") from error

    async def fill(self, buffer: memoryview) -> None:
        """Read until `buffer` is full."""
        while len(buffer):
            num_bytes = await self._loop.sock_recv_into(self._socket, buffer)
            if not num_bytes:
                raise ConnectionResetError("the other end has closed the connection")
            self._counts["page_received_bytes_total"] += num_bytes
            buffer = buffer[num_bytes:]

    def send_descriptor(self, descriptor: int) -> None:
        """Send an open file; only valid while no frame is being sent."""
        socket.send_fds(self._socket, [_DESCRIPTOR], [descriptor])

    async def receive_descriptor(self) -> int:
        """Receive an open file from the other end."""
        while True:
            try:
                return self._take_descriptor()
            except BlockingIOError:
                await readable(self._socket)

    def _take_descriptor(self) -> int:
        room = socket.CMSG_SPACE(array.array("i", [0]).itemsize)
        data, found, _, _ = self._socket.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
        handed = array.array("i")
        for level, kind, content in found:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                handed.frombytes(content[: len(content) // handed.itemsize * handed.itemsize])
        if data != _DESCRIPTOR or len(handed) != 1:
            for descriptor in handed:
                os.close(descriptor)
            raise BadPeer("no shared memory")
        return handed[0]

    def close(self) -> None:
        """Close the socket; calls in progress raise."""
        self._socket.close()


async def readable(watched: socket.socket) -> None:
    """Wait until there is data to read or a connection to accept."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(watched, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(watched)


def spawn(group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
    """Start `work` in the group of a connection, or discard it if the group is ending."""
    try:
        group.create_task(work)
    except RuntimeError:
        work.close()
