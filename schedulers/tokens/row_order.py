"""Rows in order of rank.

Owns the order alone: a row is anything with a rank.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Generic, Protocol, TypeVar


class RankedRow(Protocol):
    """A row with a rank, which never changes; no two rows have one."""

    rank: tuple[int, int]


RowT = TypeVar("RowT", bound=RankedRow)
_RANK = attrgetter("rank")


class RankedRows(Generic[RowT]):
    """Rows in order of rank; adding and removing cost one binary search and a memmove."""

    def __init__(self) -> None:
        self._rows: list[RowT] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[RowT]:
        return iter(self._rows)

    def __reversed__(self) -> Iterator[RowT]:
        return reversed(self._rows)

    def __contains__(self, row: RowT) -> bool:
        index = self._find(row)
        return index < len(self._rows) and self._rows[index] is row

    def add(self, row: RowT) -> None:
        """Insert `row` by its rank."""
        insort(self._rows, row, key=_RANK)

    def remove(self, row: RowT) -> None:
        """Remove `row` from the order."""
        assert row in self, "no such row"
        del self._rows[self._find(row)]

    def _find(self, row: RowT) -> int:
        return bisect_left(self._rows, row.rank, key=_RANK)
