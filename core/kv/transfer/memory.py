"""The interface of page transfers to the memory that holds the pages.

Owns the protocol. The memory itself is the engine's (`core.runtime.engine.page_memory`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from triptych.core.kv.parts import PartKind

MAX_BYTES_ON_THE_WAY = 64 * 2**20
"""Bytes of pages in flight per connection: sent, but not yet in the receiver's cache."""


class PageMemory(Protocol):
    """Parts of pages of one kind, here called pages, as bytes. Called from the transfer thread.

    A page is only read while no step writes it, and only written while no lease uses it.
    """

    page_bytes: int
    """The size of the largest page."""

    def num_bytes(self, page_id: int) -> int:
        """The size of a page."""
        ...

    def read(self, page_id: int, buffer: memoryview) -> None:
        """Copy a page to `buffer`, which has its size."""
        ...

    def write(self, page_id: int, buffer: memoryview) -> None:
        """Copy a page from `buffer`; complete on return."""
        ...


PartMemories = Mapping[PartKind, PageMemory]
"""The memory of each kind of parts of a model."""


def largest_part(memories: PartMemories) -> int:
    """The bytes of the largest part."""
    return max(memory.page_bytes for memory in memories.values())


def num_credits(page_bytes: int) -> int:
    """The number of pages of `page_bytes` that may be in flight at once."""
    return max(2, min(1024, MAX_BYTES_ON_THE_WAY // page_bytes))


def new_counts(page_bytes: int) -> Counter[str]:
    """The counters of a server or client: totals by series name, and two gauges.

    All names are present from the start, so that other threads may iterate.
    """
    return Counter(
        page_links=0,
        page_bytes=page_bytes,
        pages_sent_total=0,
        pages_received_total=0,
        page_sent_bytes_total=0,
        page_received_bytes_total=0,
    )
