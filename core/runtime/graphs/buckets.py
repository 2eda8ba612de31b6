"""The sizes of captured steps.

Owns the choice of sizes, and the size that a step is padded to. Knows nothing of torch, or of the
computation of a step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MIN_PAGES = 16
_PAGES_GROWTH = 4
"""A page table that is too wide costs a few idle blocks, so its sizes may be far apart."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The size of a step: rows, tokens in all, and pages per row (0 without pages)."""

    rows: int
    tokens: int
    pages: int = 0

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.tokens} tokens, {self.pages} pages"


@dataclass(frozen=True, slots=True)
class DecodeBuckets:
    """Steps of one token per row. Without `pads`, a bucket takes only steps of exactly its rows."""

    rows: Sequence[int]
    pages: Sequence[int]
    pads: bool = True

    @classmethod
    def choose(
        cls, max_rows: int, max_pages: int, *, wanted: Iterable[int] = (), pads: bool = True
    ) -> DecodeBuckets:
        """Choose buckets for batches of up to `max_rows`, or of the `wanted` sizes."""
        chosen = sorted(set(wanted)) or row_sizes(max_rows)
        return cls(tuple(chosen), tuple(_page_sizes(max_pages)), pads)

    def fit(self, num_rows: int, num_pages: int) -> Bucket | None:
        """Find the smallest bucket that holds a step, or `None`."""
        rows, pages = smallest(self.rows, num_rows), smallest(self.pages, num_pages)
        if rows is None or pages is None or not (self.pads or rows == num_rows):
            return None
        return Bucket(rows, rows, pages)

    def all(self) -> list[Bucket]:
        """All buckets, the largest first: later captures reuse its memory."""
        return [Bucket(r, r, p) for r in reversed(self.rows) for p in reversed(self.pages)]


def row_sizes(most: int) -> list[int]:
    """Powers of two, the sizes halfway between them, and `most`: at worst a third is padding."""
    sizes, size = {most}, 1
    while size < most:
        sizes |= {size, size + size // 2}
        size *= 2
    return sorted(size for size in sizes if size <= most)


def smallest(sizes: Sequence[int], least: int) -> int | None:
    """The first of ascending sizes that is large enough."""
    place = bisect_left(sizes, least)
    return sizes[place] if place < len(sizes) else None


def _page_sizes(most: int) -> list[int]:
    sizes, size = [], _MIN_PAGES
    while size < most:
        sizes.append(size)
        size *= _PAGES_GROWTH
    return [*sizes, most]
