"""Pages in host memory.

Owns the memory, one block that the system backs as it is written, and its division into pages.
Knows no device and no thread: `core.kv.tiers.store` copies.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

from triptych.core.kv.tiers.order import PageOrder


class HostTier:
    """At most `num_bytes // page_bytes` pages, at least one."""

    def __init__(self, num_bytes: int, page_bytes: int) -> None:
        assert num_bytes >= page_bytes > 0, "the tier holds at least one page"
        self.num_pages = num_bytes // page_bytes
        self.page_bytes = page_bytes
        self.order = PageOrder()
        self._block = mmap.mmap(-1, self.num_pages * page_bytes)
        self._memory = memoryview(self._block)
        self._free = list(range(self.num_pages - 1, -1, -1))

    @property
    def num_bytes(self) -> int:
        """The bytes of the pages that are here."""
        return len(self.order) * self.page_bytes

    @property
    def is_full(self) -> bool:
        """Whether a page has to give way to the next one."""
        return not self._free

    def page(self, key: bytes) -> memoryview | None:
        """The bytes of a page; `None` if it is not here."""
        place = self.order.place(key)
        return None if place is None else self._view(place)

    def add(self, key: bytes) -> memoryview:
        """Take memory for a page that is not here, which the caller fills."""
        place = self._free.pop()
        self.order.add(key, place)
        return self._view(place)

    def drop(self, key: bytes) -> None:
        """Free the memory of a page, if it is here."""
        place = self.order.drop(key)
        if place is not None:
            self._free.append(place)

    def close(self) -> None:
        """Return the memory to the system, with the last view of it."""
        self._memory.release()
        with suppress(BufferError):
            self._block.close()

    def _view(self, place: int) -> memoryview:
        first = place * self.page_bytes
        return self._memory[first : first + self.page_bytes]
