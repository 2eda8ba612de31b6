"""The connecting end: fetches pages of prompts and images from engines of other roles.

Owns the connections, one to each address, reopened when they end, all on one thread. Knows no
scheduler: a `PageFetch` maps keys to parts of pages and has callbacks for arrivals and its end. A
fetch ends exactly once, with all of its parts or with those before the first that was late or
missing; none is written after that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from triptych.core.engine_api.prompt_content import PromptContent
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.kv.parts import PagePart
from triptych.core.kv.transfer.address import PageAddress
from triptych.core.kv.transfer.channel import BadPeer, LinkRefused, PageChannel, spawn
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
    FromPrefill,
    NixlRegion,
    PageChallenge,
    PageCredit,
    PageFormat,
    PageGreeting,
    PageHeader,
    PageRefusal,
    PageWelcome,
    encode,
    is_proof,
    proof,
)
from triptych.core.kv.transfer.nixl_slots import ReadSlots
from triptych.core.kv.transfer.server import GREETING_TIMEOUT_S
from triptych.core.kv.transfer.shared_slots import IS_SUPPORTED, SharedSlots
from triptych.core.options.pipeline import NIXL
from triptych.core.process.loop_thread import LoopThread

ReceivedSlots = SharedSlots | ReadSlots
_MIN_DELAY_S = 0.1
_MAX_DELAY_S = 5.0
_MAX_BACKOFF_S = 60.0
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True, kw_only=True)
class PageFetch:
    """`num_pages` pages of a prompt or an image, from `first` on, as their parts in order.

    `arrived(num_written)` is called after each part, `ended()` last; both on the client's thread.
    """

    fetch_id: int
    request: TokenRequest | PromptContent
    first: int
    num_pages: int
    parts: Sequence[PagePart]
    arrived: Callable[[int], None]
    ended: Callable[[], None]
    num_arrived: int = 0
    is_stopped: bool = False
    _timer: asyncio.TimerHandle | None = field(default=None)

    def set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        """Replace the timer that ends the fetch, cancelling the previous one."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer


class PageClient:
    """Fetches pages of one format. `start` and `stop` may be called from any thread."""

    def __init__(
        self,
        addresses: Sequence[PageAddress],
        secret: bytes,
        page_format: PageFormat,
        memories: PartMemories,
        *,
        timeout_s: float,
    ) -> None:
        self.page_bytes = largest_part(memories)
        self.counts = new_counts(self.page_bytes)
        """Counters by series name."""
        self.secret = secret
        self.format = page_format
        self.memories = memories
        self.timeout_s = timeout_s
        self._links = [_PageLink(self, address) for address in addresses]
        self._tasks: list[asyncio.Task[None]] = []
        self._thread = LoopThread("triptych-pages")
        self._loop = self._thread.run(self._open())

    @property
    def is_connected(self) -> bool:
        """Whether any engine is available; from any thread."""
        return any(link.is_available for link in self._links)

    def start(self, fetch: PageFetch) -> None:
        """Fetch from the engine with the fewest pages pending."""
        self._loop.call_soon_threadsafe(self._start, fetch)

    def stop(self, fetch: PageFetch) -> None:
        """End a fetch early."""
        self._loop.call_soon_threadsafe(self._stop, fetch)

    def close(self) -> None:
        """End all connections; no page is written after this."""
        self._thread.close()

    async def _open(self) -> asyncio.AbstractEventLoop:
        self._tasks = [asyncio.create_task(link.run()) for link in self._links]
        return asyncio.get_running_loop()

    def _start(self, fetch: PageFetch) -> None:
        willing = [link for link in self._links if link.has_capacity]
        if willing:
            min(willing, key=lambda link: link.num_pending).start(fetch)
        else:
            fetch.ended()

    def _stop(self, fetch: PageFetch) -> None:
        for link in self._links:
            link.drop(fetch)


class _PageLink:
    """The connection to one address, reopened whenever it ends."""

    def __init__(self, client: PageClient, address: PageAddress) -> None:
        self.is_up = False
        self._client = client
        self._address = address
        self._fetches: dict[int, PageFetch] = {}
        self._transfers: set[int] = set()  # fetches that the other end has not ended
        self._is_useful = False
        self._num_frames = 0
        self._backoff_s = 0.0
        self._backoff_until_s = 0.0
        self._last_error = ""
        self._num_credits = num_credits(client.page_bytes)
        self._scratch = memoryview(bytearray(client.page_bytes))
        self._channel: PageChannel
        self._group: asyncio.TaskGroup

    @property
    def is_available(self) -> bool:
        """Whether the other end is connected and not in back-off; from any thread."""
        return self.is_up and time.monotonic() >= self._backoff_until_s

    @property
    def has_capacity(self) -> bool:
        """Whether another fetch may start; after a late one, only one at a time."""
        most = 1 if self._backoff_s else MAX_TRANSFERS
        return self.is_available and len(self._transfers) < most

    @property
    def num_pending(self) -> int:
        """Parts of pages requested and not yet received."""
        return sum(len(fetch.parts) - fetch.num_arrived for fetch in self._fetches.values())

    async def run(self) -> None:
        """Keep connecting, with growing delays after connections that delivered no page."""
        delay_s = _MIN_DELAY_S
        while True:
            self._is_useful = False
            try:
                await self._connect()
            except* (BadPeer, LinkRefused, OSError) as group:
                self._log_error(group.exceptions[0])
            except* Exception:  # a bug of our own must not end the link
                _log.exception("a connection for pages failed")
            delay_s = _MIN_DELAY_S if self._is_useful else min(2 * delay_s, _MAX_DELAY_S)
            await asyncio.sleep(delay_s)

    def start(self, fetch: PageFetch) -> None:
        """Request the pages of `fetch`; it ends at once if the request exceeds the frame bound."""
        wanted = FetchPages(
            fetch_id=fetch.fetch_id,
            request=fetch.request,
            first=fetch.first,
            num_pages=fetch.num_pages,
            num_parts=len(fetch.parts),
        )
        frame = encode(wanted)
        if len(frame) > MAX_REQUEST_BYTES:
            fetch.ended()
            return
        self._fetches[fetch.fetch_id] = fetch
        self._transfers.add(fetch.fetch_id)
        self._arm_timer(fetch)
        spawn(self._group, self._channel.send_frame(frame))

    def drop(self, fetch: PageFetch) -> None:
        """End a fetch early, if it belongs to this link."""
        if self._fetches.get(fetch.fetch_id) is fetch:
            self._end(fetch)
            if self.is_up:
                spawn(self._group, self._channel.send(DropFetch(fetch.fetch_id)))

    def _log_error(self, error: BaseException) -> None:
        """Log why there is no connection, once for each reason."""
        said = f"{error}" or type(error).__name__
        if said != self._last_error:
            what = self._client.format.content
            _log.warning("cannot fetch %s from %s: %s", what, self._address, said)
        self._last_error = said

    async def _connect(self) -> None:
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            self._channel = channel = PageChannel(
                await self._address.connect(), self._client.counts
            )
        client, slots = self._client, None
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                slots = await self._greet(channel)
            _log.info("fetching %s from %s", client.format.content, self._address)
            async with asyncio.TaskGroup() as self._group:
                self.is_up, self._last_error = True, ""
                client.counts["page_links"] += 1
                try:
                    await self._read(slots)
                finally:
                    client.counts["page_links"] -= 1
                    self._end_all()
        finally:
            channel.close()
            if slots is not None:
                slots.close()

    def _end_all(self) -> None:
        """End all fetches: the connection is gone."""
        self.is_up = False
        self._transfers.clear()
        for fetch in tuple(self._fetches.values()):
            self._end(fetch)

    async def _greet(self, channel: PageChannel) -> ReceivedSlots | None:
        """Authenticate both ends and agree on a transport. Raises `LinkRefused`."""
        client, nonce = self._client, secrets.token_bytes(NONCE_BYTES)
        challenge: PageChallenge = await channel.receive(PageChallenge, MAX_GREETING_BYTES)
        if challenge.version != VERSION:
            raise LinkRefused("version", f"version {VERSION} here, {challenge.version} there")
        nonces = challenge.nonce, nonce
        slots, descriptor = None, -1
        if client.format.transport != NIXL and self._address.path and IS_SUPPORTED:
            slots, descriptor = SharedSlots.make(self._num_credits, client.page_bytes)
        try:
            greeting = PageGreeting(
                nonce=nonce,
                proof=proof(client.secret, "decode", nonces),
                format=client.format,
                num_credits=self._num_credits,
                num_slots=slots.num_slots if slots is not None else 0,
            )
            await channel.send(greeting)
            if slots is not None:
                channel.send_descriptor(descriptor)
            answer = await channel.receive(PageWelcome | PageRefusal, MAX_GREETING_BYTES)
            if isinstance(answer, PageRefusal):
                raise LinkRefused(answer.code, f"refused ({answer.code}): {answer.message:.600}")
            if not is_proof(answer.proof, client.secret, "prefill", nonces):
                raise LinkRefused("secret", "the secrets of --pipeline-key-file differ")
            if client.format.transport == NIXL:
                return self._read_slots(answer.region)
        except BaseException:
            if slots is not None:
                slots.close()
            raise
        finally:
            if slots is not None:
                os.close(descriptor)
        return slots

    def _read_slots(self, region: NixlRegion | None) -> ReadSlots:
        if region is None:
            raise BadPeer("no region to read")
        return ReadSlots(self._num_credits, self._client.page_bytes, region)

    async def _read(self, slots: ReceivedSlots | None) -> None:
        """Handle messages until the other end disconnects or violates the protocol."""
        while True:
            message: FromPrefill = await self._channel.receive(FromPrefill, MAX_GREETING_BYTES)
            self._num_frames += 1
            match message:
                case PageHeader():
                    await self._take_page(message, slots)
                case FetchEnded():
                    self._transfers.discard(message.fetch_id)
                    if (fetch := self._fetches.get(message.fetch_id)) is not None:
                        _log.info("%s missing: %.300s", self._client.format.content, message.reason)
                        self._end(fetch)
                case _:
                    raise BadPeer("a second greeting")

    async def _take_page(self, header: PageHeader, slots: ReceivedSlots | None) -> None:
        client, num_bytes = self._client, header.num_bytes
        if not 0 < num_bytes <= client.page_bytes:
            raise BadPeer("a page of the wrong size")
        page = self._scratch[:num_bytes]
        if slots is None and header.slot == -1:
            await self._channel.fill(page)
        elif slots is not None and 0 <= header.slot < slots.num_slots:
            await slots.read_slot(header.slot, num_bytes)
            page = slots.slot(header.slot)[:num_bytes]
            client.counts["page_received_bytes_total"] += len(page)
        else:
            raise BadPeer("no such slot")
        fetch = self._fetches.get(header.fetch_id)
        if fetch is not None:
            part = fetch.parts[fetch.num_arrived]
            memory, is_next = client.memories[part.kind], header.is_of(part)
            if not is_next or num_bytes != memory.num_bytes(part.number):
                raise BadPeer("a page out of order")
            memory.write(part.number, page)
            self._count(fetch)
        client.counts["pages_received_total"] += 1
        self._is_useful = True
        await self._channel.send(PageCredit(header.slot))  # before the next page is read
        await asyncio.sleep(0)  # let other tasks run, however fast pages arrive

    def _count(self, fetch: PageFetch) -> None:
        """Count a written page, and end the fetch after its last."""
        fetch.num_arrived += 1
        fetch.arrived(fetch.num_arrived)
        if fetch.num_arrived == len(fetch.parts):
            self._backoff_s = 0.0
            self._end(fetch)
        else:
            self._arm_timer(fetch)

    def _arm_timer(self, fetch: PageFetch) -> None:
        """Set the timeout for the next page of `fetch`."""
        loop = asyncio.get_running_loop()
        fetch.set_timer(loop.call_later(self._client.timeout_s, self._on_timeout, fetch))

    def _on_timeout(self, fetch: PageFetch) -> None:
        """End a late fetch and back off; check that the other end still answers."""
        self._back_off()
        self.drop(fetch)
        if self.is_up:
            spawn(self._group, self._expect_frame())

    def _back_off(self) -> None:
        """Start no fetches for a while, doubled each time in a row: they would be late as well."""
        now_s, least_s = time.monotonic(), self._client.timeout_s
        if now_s >= self._backoff_until_s:  # otherwise the fetch began before the current back-off
            self._backoff_s = max(least_s, min(2 * self._backoff_s, _MAX_BACKOFF_S))
            self._backoff_until_s = now_s + self._backoff_s
            what, rest_s = self._client.format.content, self._backoff_s
            _log.info("%s from %s are late: no fetches for %g s", what, self._address, rest_s)

    async def _expect_frame(self) -> None:
        """Raise `BadPeer` if no frame arrives: a drop is answered at once, even under load."""
        num_before, wait_s = self._num_frames, min(self._client.timeout_s, GREETING_TIMEOUT_S)
        await asyncio.sleep(wait_s)
        if self._num_frames == num_before:
            self.is_up = False  # a send might block forever
            raise BadPeer(f"no answer for {wait_s:g} s")

    def _end(self, fetch: PageFetch) -> None:
        fetch.set_timer(None)
        del self._fetches[fetch.fetch_id]
        try:
            fetch.ended()
        except Exception:  # a bug of our own must not keep later fetches from ending
            _log.exception("the end of a fetch was not handled")
