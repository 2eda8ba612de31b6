"""The listening end: sends pages to connected engines while later pages are being computed.

Owns the listening socket, authentication, and the order of pages on each connection, all on its own
thread. Knows no scheduler: a `PageTransferHandler` computes prompts or encodes images and adds
pages to a transfer as they are ready. A misbehaving peer loses only its own connection: frames,
transfers and time are bounded, and peers that stop reading are disconnected.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from triptych.core.kv.parts import PagePart
from triptych.core.kv.transfer.address import PageAddress, set_tcp_options
from triptych.core.kv.transfer.channel import BadPeer, LinkRefused, PageChannel, readable, spawn
from triptych.core.kv.transfer.memory import (
    PartMemories,
    largest_part,
    new_counts,
    num_credits,
)
from triptych.core.kv.transfer.messages import (
    MAX_GREETING_BYTES,
    MAX_REQUEST_BYTES,
    MAX_TRANSFERS,
    NONCE_BYTES,
    VERSION,
    DropFetch,
    FetchEnded,
    FetchPages,
    FromDecode,
    PageChallenge,
    PageCredit,
    PageFormat,
    PageGreeting,
    PageHeader,
    PageRefusal,
    PageWelcome,
    is_proof,
    proof,
)
from triptych.core.kv.transfer.nixl_slots import OfferedSlots
from triptych.core.kv.transfer.shared_slots import IS_SUPPORTED, SharedSlots
from triptych.core.options.pipeline import NIXL
from triptych.core.process.loop_thread import LoopThread

SentSlots = SharedSlots | OfferedSlots
GREETING_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 64
_MAX_UNAUTHENTICATED = 32
"""Connections whose peer is not authenticated; many only in a flood."""
_log = logging.getLogger(__name__)


class PageTransferRequest:
    """A request for pages. `add` and `end` may be called from any thread."""

    def __init__(self, wanted: FetchPages) -> None:
        self.wanted = wanted
        self.reason = ""
        self.is_dropped = False
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Queue[PagePart | None] = asyncio.Queue()

    def add(self, parts: Sequence[PagePart]) -> None:
        """Add the next parts of pages."""
        for part in parts:
            self._put(part)

    def end(self, reason: str) -> None:
        """End the transfer early, with the reason for the missing pages."""
        self.reason = reason
        self._put(None)

    def drop(self) -> None:
        """Cancel the transfer; on the server's thread."""
        self.is_dropped = True
        self.end("dropped")

    async def next(self) -> PagePart | None:
        """Wait for the next part of a page; `None` after an early end."""
        return await self._ready.get()

    def _put(self, part: PagePart | None) -> None:
        with suppress(RuntimeError):  # the server is closed
            self._loop.call_soon_threadsafe(self._ready.put_nowait, part)


class PageTransferHandler(Protocol):
    """Schedules the computation of requested pages. Called from the server's thread."""

    def open(self, transfer: PageTransferRequest) -> None:
        """Compute pages and add them to `transfer`; they stay unchanged until `close`."""
        ...

    def close(self, transfer: PageTransferRequest) -> None:
        """End an opened transfer: its pages are no longer read."""
        ...


class PageServer:
    """Listens on an address for engines with the same secret and page format.

    Raises `ConfigError` if it cannot listen.
    """

    def __init__(
        self,
        address: PageAddress,
        secret: bytes,
        page_format: PageFormat,
        memories: PartMemories,
        *,
        timeout_s: float,
    ) -> None:
        self.page_bytes = largest_part(memories)
        self.counts = new_counts(self.page_bytes)
        """Counters by series name."""
        self.format = page_format
        self.memories = memories
        self.timeout_s = timeout_s
        self._address = address
        self._secret = secret
        self._listener = address.listen()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unauthenticated: dict[asyncio.Task[None], str] = {}
        """Unauthenticated connections in order of arrival, and their hosts."""
        self._thread = LoopThread("triptych-pages")

    def start(self, transfers: PageTransferHandler) -> None:
        """Start accepting connections."""
        self._thread.run(self._start(transfers))
        _log.info("serving %s at %s", self.format.content, self._address)

    @property
    def port(self) -> int:
        """The TCP port, chosen by the system if the address has port 0."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """End all connections; no page is read after this."""
        self._thread.close()
        self._address.unlink()
        self._listener.close()

    async def _start(self, transfers: PageTransferHandler) -> None:
        self._spawn(self._accept(transfers))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, transfers: PageTransferHandler) -> None:
        while True:
            await readable(self._listener)
            try:  # not awaited: cancellation would lose an accepted connection
                connected, peer = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError as error:  # such as too many open files
                _log.warning("a page connection was not accepted: %s", error.strerror)
                await asyncio.sleep(1.0)
                continue
            if len(self._tasks) - len(self._unauthenticated) > _MAX_CONNECTIONS:
                connected.close()
            else:
                self._evict_unauthenticated()
                task = self._spawn(self._serve(connected, transfers))
                self._unauthenticated[task] = peer[0] if isinstance(peer, tuple) else ""
                task.add_done_callback(
                    partial(_close_socket, connected)
                )  # the task may be cancelled before it starts
                task.add_done_callback(self._set_authenticated)

    def _evict_unauthenticated(self) -> None:
        """Close the oldest unauthenticated connection of the host that has the most."""
        if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
            most, _ = Counter(self._unauthenticated.values()).most_common(1)[0]
            oldest = next(task for task, host in self._unauthenticated.items() if host == most)
            self._set_authenticated(oldest)
            oldest.cancel()

    def _set_authenticated(self, task: asyncio.Task[None] | None) -> None:
        """Remove `task` from the unauthenticated connections."""
        if task is not None:
            self._unauthenticated.pop(task, None)

    async def _serve(self, connected: socket.socket, transfers: PageTransferHandler) -> None:
        """Serve one connection until it ends."""
        connected.setblocking(False)
        set_tcp_options(connected)
        channel, slots = PageChannel(connected, self.counts), None
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                greeting, slots = await self._greet(channel)
            self._set_authenticated(asyncio.current_task())
            self.counts["page_links"] += 1
            try:
                await _Connection(self, channel, transfers, greeting.num_credits, slots).run()
            finally:
                self.counts["page_links"] -= 1
        except* (BadPeer, LinkRefused, OSError) as group:  # TimeoutError is an OSError
            reasons = ", ".join(str(error) or type(error).__name__ for error in group.exceptions)
            _log.info("a page connection ended: %s", reasons)
        except* Exception:  # a bug of our own must be logged
            _log.exception("a page connection failed")
        finally:
            channel.close()
            if slots is not None:
                slots.close()

    async def _greet(self, channel: PageChannel) -> tuple[PageGreeting, SentSlots | None]:
        """Authenticate a peer and agree on a transport, or refuse and raise `LinkRefused`."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        await channel.send(PageChallenge(nonce))
        greeting: PageGreeting = await channel.receive(PageGreeting, MAX_GREETING_BYTES)
        nonces = nonce, greeting.nonce
        refusal, slots = self._check(greeting, nonces), None
        if refusal is None and greeting.num_slots:
            slots = await self._take_slots(channel, greeting)
            if slots is None:
                refusal = PageRefusal("shared-memory", "No shared memory of that size was sent.")
        if refusal is not None:
            await channel.send(refusal)
            raise LinkRefused(refusal.code, f"refused ({refusal.code}): {refusal.message}")
        if self.format.transport == NIXL:
            slots = OfferedSlots(greeting.num_credits, self.page_bytes)
        try:
            region = slots.region if isinstance(slots, OfferedSlots) else None
            await channel.send(PageWelcome(proof(self._secret, "prefill", nonces), region))
        except BaseException:
            if slots is not None:
                slots.close()
            raise
        return greeting, slots

    def _check(self, greeting: PageGreeting, nonces: tuple[bytes, bytes]) -> PageRefusal | None:
        if greeting.version != VERSION:
            return PageRefusal("version", f"Version {VERSION} here, {greeting.version} there.")
        if not is_proof(greeting.proof, self._secret, "decode", nonces):
            return PageRefusal("secret", "The secrets of --pipeline-key-file differ.")
        if difference := self.format.difference(greeting.format):
            return PageRefusal("format", f"Pages differ. {difference}.")
        most = num_credits(self.format.page_bytes)
        if not 0 < greeting.num_credits <= most or greeting.num_slots not in (
            0,
            greeting.num_credits,
        ):
            return PageRefusal("format", f"1 to {most} pages may be in flight.")
        return None

    async def _take_slots(self, channel: PageChannel, greeting: PageGreeting) -> SentSlots | None:
        if self.format.transport == NIXL or not (self._address.path and IS_SUPPORTED):
            return None
        descriptor = await channel.receive_descriptor()
        return SharedSlots.take(descriptor, greeting.num_slots, self.format.page_bytes)


def _close_socket(connected: socket.socket, _: object) -> None:
    connected.close()


class _Connection:
    """An authenticated connection."""

    def __init__(
        self,
        server: PageServer,
        channel: PageChannel,
        transfers: PageTransferHandler,
        num_credits: int,
        slots: SentSlots | None,
    ) -> None:
        self._server = server
        self._channel = channel
        self._transfers = transfers
        self._slots = slots
        self._open: dict[int, PageTransferRequest] = {}
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for index in range(num_credits):
            self._free.put_nowait(-1 if slots is None else index)
        self._in_flight: list[int] = []
        self._has_in_flight = asyncio.Event()
        self._deadline = asyncio.timeout(None)
        self._scratch = memoryview(bytearray(server.page_bytes if slots is None else 0))
        self._scratch_lock = asyncio.Lock()

    async def run(self) -> None:
        """Serve until the peer disconnects, violates the protocol, or accepts no page in time."""
        async with self._deadline, asyncio.TaskGroup() as group:
            if self._slots is not None:
                group.create_task(self._slots.drive_progress(self._has_in_flight))
            while True:
                self._take(await self._channel.receive(FromDecode, MAX_REQUEST_BYTES), group)

    def _take(self, message: FromDecode, group: asyncio.TaskGroup) -> None:
        match message:
            case FetchPages():
                if message.fetch_id in self._open or len(self._open) >= MAX_TRANSFERS:
                    raise BadPeer("a duplicate fetch, or too many")
                transfer = self._open[message.fetch_id] = PageTransferRequest(message)
                spawn(group, self._fill(transfer))
            case DropFetch():
                if (dropped := self._open.get(message.fetch_id)) is not None:
                    dropped.drop()
            case PageCredit():
                if message.slot not in self._in_flight:
                    raise BadPeer("a credit for a slot not in use")
                self._in_flight.remove(message.slot)
                if not self._in_flight:
                    self._has_in_flight.clear()
                self._free.put_nowait(message.slot)
                self._reset_deadline()
            case _:
                raise BadPeer("a second greeting")

    async def _fill(self, transfer: PageTransferRequest) -> None:
        """Send a transfer's pages as they become ready."""
        wanted = transfer.wanted
        try:
            self._transfers.open(transfer)
            for _ in range(wanted.num_parts):
                part = await transfer.next()
                if part is None or transfer.is_dropped:
                    break
                await self._send_part(wanted.fetch_id, part)
            del self._open[wanted.fetch_id]
            async with asyncio.timeout(self._server.timeout_s):
                await self._channel.send(FetchEnded(wanted.fetch_id, transfer.reason))
        finally:
            self._transfers.close(transfer)

    async def _send_part(self, fetch_id: int, part: PagePart) -> None:
        memory, counts = self._server.memories[part.kind], self._server.counts
        slot = await self._free.get()
        self._in_flight.append(slot)
        self._has_in_flight.set()
        if len(self._in_flight) == 1:
            self._reset_deadline()
        num_bytes = memory.num_bytes(part.number)
        header = PageHeader(
            fetch_id=fetch_id, key=part.key, kind=part.kind, num_bytes=num_bytes, slot=slot
        )
        if self._slots is not None:
            memory.read(part.number, self._slots.slot(slot)[:num_bytes])
            await self._channel.send(header)
            counts["page_sent_bytes_total"] += num_bytes
        else:
            async with self._scratch_lock:
                page = self._scratch[:num_bytes]
                memory.read(part.number, page)
                await self._channel.send(header, page)
        counts["pages_sent_total"] += 1

    def _reset_deadline(self) -> None:
        """Restart the peer's deadline to accept a page, or stop it if none is in flight."""
        if not self._deadline.expired():
            due_s = asyncio.get_running_loop().time() + self._server.timeout_s
            self._deadline.reschedule(due_s if self._in_flight else None)
