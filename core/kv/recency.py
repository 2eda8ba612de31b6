"""A list of numbers in the order they were added, with O(1) add, remove and pop.

Owns two arrays of links. Knows nothing of what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Iterator

_ABSENT = -1


class RecencyList:
    """Holds each of `0 .. size - 1` at most once, oldest first.

    An intrusive doubly linked ring: the links of item `i` are at index `i`, and index `size` is
    the sentinel between newest and oldest. No allocation after construction.
    """

    def __init__(self, size: int) -> None:
        self._end = size
        self._next = [_ABSENT] * size + [size]
        self._previous = [_ABSENT] * size + [size]
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, item: int) -> bool:
        return self._next[item] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        item = self._next[self._end]
        while item != self._end:
            yield item
            item = self._next[item]

    def append(self, item: int) -> None:
        """Add `item` as the newest."""
        assert item not in self, "already in the list"
        newest = self._previous[self._end]
        self._next[newest] = self._previous[self._end] = item
        self._previous[item], self._next[item] = newest, self._end
        self._length += 1

    def remove(self, item: int) -> None:
        """Take `item` out, wherever it stands."""
        assert item in self, "not in the list"
        before, after = self._previous[item], self._next[item]
        self._next[before], self._previous[after] = after, before
        self._next[item] = self._previous[item] = _ABSENT
        self._length -= 1

    def pop_oldest(self) -> int:
        """Take out the item added longest ago."""
        oldest = self._next[self._end]
        assert oldest != self._end, "the list is empty"
        self.remove(oldest)
        return oldest

    def check(self) -> None:
        """Assert that the links agree with each other and with the length."""
        items = list(self)
        assert len(items) == self._length
        assert all(self._previous[self._next[item]] == item for item in [*items, self._end])
        assert sum(item in self for item in range(self._end)) == self._length
