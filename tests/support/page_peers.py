"""Both ends of a connection for pages, over bytes, and prompts that a test computes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triptych.core.kv.keys import page_key, root_key
from triptych.core.kv.transfer.address import PageAddress
from triptych.core.kv.transfer.client import PageClient, PageFetch
from triptych.core.kv.transfer.messages import PageFormat
from triptych.core.kv.transfer.server import PageOrder, PageServer
from triptych.core.tokens import TokenRequest

PAGE_BYTES = 1024
SECRET = b"sixteen bytes or more"
FORMAT = PageFormat(
    weights="00", layout="tiny", order="torch", compute="float32", max_length=64, page_bytes=1024
)
KEYS = [page_key(root_key(b"weights"), (n,)) for n in range(200)]
_ids = itertools.count()


def content(key: bytes) -> bytes:
    """What the page of a key holds."""
    return (key * (PAGE_BYTES // len(key)))[:PAGE_BYTES]


class ByteMemory:
    """Pages as bytes. Implements `PageMemory`."""

    page_bytes = PAGE_BYTES

    def __init__(self, num_pages: int = 200) -> None:
        self.pages = [bytes(PAGE_BYTES)] * num_pages

    def read(self, page_id: int, buffer: memoryview) -> None:
        buffer[:] = self.pages[page_id]

    def write(self, page_id: int, buffer: memoryview) -> None:
        self.pages[page_id] = bytes(buffer)


@dataclass
class Orders:
    """Prompts that are computed when a test says so. Implements `PageOrders`."""

    memory: ByteMemory
    is_instant: bool = True
    opened: list[PageOrder] = field(default_factory=list)
    closed: list[PageOrder] = field(default_factory=list)

    def open(self, order: PageOrder) -> None:
        self.opened.append(order)
        if self.is_instant:
            self.compute(order, order.wanted.num_pages)

    def close(self, order: PageOrder) -> None:
        self.closed.append(order)

    def compute(self, order: PageOrder, num_pages: int) -> None:
        """The first pages are there; a page's number is its place in the prompt."""
        first = order.wanted.first
        for n in range(first, first + num_pages):
            self.memory.pages[n] = content(KEYS[n])
        order.add([(KEYS[n], n) for n in range(first, first + num_pages)])


class Fetched:
    """A fetch of pages to the page of the same number, and what came of it."""

    def __init__(self, num_pages: int, first: int = 0) -> None:
        self.num_arrived = 0
        self.num_ended = 0
        self.fetch = PageFetch(
            fetch_id=next(_ids),
            request=TokenRequest(prompt_ids=(1, 2, 3)),
            first=first,
            keys=KEYS[first : first + num_pages],
            page_ids=list(range(first, first + num_pages)),
            arrived=self._arrive,
            ended=self._end,
        )

    def _arrive(self, num: int) -> None:
        assert not self.num_ended
        assert num == self.num_arrived + 1
        self.num_arrived = num

    def _end(self) -> None:
        self.num_ended += 1


def open_server(
    address: str, memory: ByteMemory, secret: bytes = SECRET, timeout_s: float = 5.0
) -> PageServer:
    return PageServer(PageAddress.parse(address), secret, FORMAT, memory, timeout_s=timeout_s)


def open_client(*addresses: str, memory: ByteMemory | None = None, **more: Any) -> PageClient:
    given = {"secret": SECRET, "page_format": FORMAT, "timeout_s": 5.0} | more
    found = [PageAddress.parse(address) for address in addresses]
    return PageClient(found, memory=memory or ByteMemory(), **given)


async def until(condition: Callable[[], object]) -> None:
    """Wait, within bounds, for what another thread does."""
    async with asyncio.timeout(20.0):
        while not condition():  # noqa: ASYNC110 (the other side has no event to wait for)
            await asyncio.sleep(0.002)


def unix_address(folder: Path) -> str:
    return f"unix:{folder}/pages"
