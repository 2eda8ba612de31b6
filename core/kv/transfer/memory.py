"""What carries pages knows of the memory they lie in.

Owns the protocol. The memory itself is the engine's (`core.runtime.engine.page_memory`).
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

MAX_BYTES_ON_THE_WAY = 64 * 2**20
"""Of pages that were sent to an engine and are not in its cache yet, for one connection."""


class PageMemory(Protocol):
    """Pages of one model, as bytes. Called from the thread that carries them.

    Only pages that nobody writes are read, and only those that nobody else uses are written.
    """

    page_bytes: int
    """No page has more."""

    def num_bytes(self, page_id: int) -> int:
        """How many a page has."""
        ...

    def read(self, page_id: int, buffer: memoryview) -> None:
        """Copy a page to `buffer`, which has its size."""
        ...

    def write(self, page_id: int, buffer: memoryview) -> None:
        """Copy a page from `buffer`; it is there when this returns."""
        ...


def num_credits(page_bytes: int) -> int:
    """Pages of a size that may be on the way at once."""
    return max(2, min(1024, MAX_BYTES_ON_THE_WAY // page_bytes))


def new_counts(page_bytes: int) -> Counter[str]:
    """What one end of connections counts: totals by the name of their series, and two gauges.

    All names are there from the first, so that other threads may read it.
    """
    return Counter(
        page_links=0,
        page_bytes=page_bytes,
        pages_sent_total=0,
        pages_received_total=0,
        page_sent_bytes_total=0,
        page_received_bytes_total=0,
    )
