"""Pages of layers with a window: fewer than those of other layers, and given back sooner.

Owns these pages and which page of a row has which. Knows no leases and no tensors.

A page of the pool holds a row's tokens in layers that see all of them, and has at most one page
here, its *part* in the layers with a window. The part is taken when the first step writes to it,
and dropped once no later token of the row sees it. A part that no row holds stays, as long as its
page can be found: a row may begin after some pages where the parts are known that its first token
sees, which are those of the last `reach` pages. Parts that rows dropped on their way are
overwritten first, then those of rows that ended, or that another row found, by their last use.

Steps run in order on the device. So a part that a row dropped may be overwritten by a later step
than the last one that reads it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowSize:
    """The pages of layers with a window, for up to `num_rows` rows at a time.

    The window of a page's first token reaches `reach` pages back.
    """

    num_pages: int
    num_rows: int
    reach: int

    @classmethod
    def least(cls, window: int, page_size: int, *, num_rows: int, step_tokens: int) -> WindowSize:
        """The fewest pages with which rows never wait for each other without end.

        A row between steps holds the pages that the first token of its current page sees, and that
        page; it may need one more. A step takes pages for all its tokens.
        """
        reach = -(-(window - 1) // page_size)
        return cls(num_rows * (reach + 2) - (-step_tokens // page_size), num_rows, reach)


class WindowPages:
    """Parts `0 .. size.num_pages - 1` of `num_pages` pages."""

    def __init__(self, size: WindowSize, num_pages: int) -> None:
        self.size = size
        self.reach = size.reach
        self._free = list(range(size.num_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # pages, those to be overwritten first
        self._parts = [-1] * num_pages
        self._num_holders = [0] * num_pages

    @property
    def num_available(self) -> int:
        """Parts that `take` can give."""
        return len(self._free) + len(self._kept)

    def gauges(self) -> dict[str, float]:
        """The current counts, by series name."""
        num_pages = self.size.num_pages
        return {
            "kv_window_pages": num_pages,
            "kv_window_pages_leased": num_pages - self.num_available,
        }

    def has(self, page_id: int) -> bool:
        """Whether a page has a part."""
        return self._parts[page_id] >= 0

    def hold(self, page_id: int) -> int:
        """Hold the part of a page, which has one, for one more row or copy; returns the part."""
        if not self._num_holders[page_id]:
            del self._kept[page_id]
        self._num_holders[page_id] += 1
        return self._parts[page_id]

    def take(self, page_id: int) -> int:
        """Give a page without a part one, held by one row; returns the part."""
        assert self._parts[page_id] < 0, "the page has a part"
        if not self._free:
            self.forget(next(iter(self._kept)))
        part = self._free.pop()
        self._parts[page_id] = part
        self._num_holders[page_id] = 1
        return part

    def drop(self, page_id: int, *, is_kept: bool, is_first: bool = False) -> None:
        """Give up one hold; with the last one the part is kept, or freed.

        One that `is_first` is overwritten before the others.
        """
        self._num_holders[page_id] -= 1
        if self._num_holders[page_id]:
            return
        self._kept[page_id] = None
        if not is_kept:
            self.forget(page_id)
        elif is_first:
            self._kept.move_to_end(page_id, last=False)

    def forget(self, page_id: int) -> None:
        """Free the part of a page, if no row holds it."""
        if page_id in self._kept:
            del self._kept[page_id]
            self._free.append(self._parts[page_id])
            self._parts[page_id] = -1

    def check(self, held: Iterable[int], found: set[int]) -> None:
        """Assert that every part is in one place; rows hold `held`, and `found` can be found."""
        holders = Counter(held)
        assert [holders[page] for page in range(len(self._parts))] == self._num_holders
        owners = {page for page, part in enumerate(self._parts) if part >= 0}
        assert owners == holders.keys() | self._kept.keys(), "a part has no owner"
        assert not holders.keys() & self._kept.keys(), "a held part may be overwritten"
        assert self._kept.keys() <= found, "a part is kept that cannot be found"
        parts = [*self._free, *(self._parts[page] for page in owners)]
        assert sorted(parts) == list(range(self.size.num_pages)), "a part is lost"
