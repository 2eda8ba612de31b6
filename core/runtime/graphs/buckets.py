"""The sizes of captured steps.

Owns the choice of sizes, and the size that a step is padded to. Knows nothing of torch, or of the
computation of a step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_CAPTURED_TOKENS = 1024
"""Prompt tokens of a captured step: the kernels of more take longer than their launches."""
_MIN_TOKENS = 16
_MIN_DECODE_ROWS = 8
_CHUNKS = 16
"""Prompt chunks of each captured step, one of padding among them: an empty one costs one block."""
_MIN_PAGES = 16
_PAGES_GROWTH = 4
"""A page table that is too wide costs a few idle blocks, so its sizes may be far apart."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The size of a step: rows, tokens in all, and pages per row (0 without pages).

    The last `chunks` of the rows are chunks of prompts, all others are rows of one token.
    """

    rows: int
    tokens: int
    pages: int = 0
    chunks: int = 0

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.tokens} tokens, {self.pages} pages"

    @property
    def decode_rows(self) -> int:
        """The number of rows of one token, which come first."""
        return self.rows - self.chunks


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


@dataclass(frozen=True, slots=True)
class PromptBuckets:
    """Steps with prompt chunks, and decode rows before them.

    A step is padded with decode rows, and with one chunk that takes the tokens left over. All sizes
    are powers of two, because a step is launched faster than it is computed long before it is
    padded by many tokens.
    """

    decode_rows: Sequence[int]
    tokens: Sequence[int]
    pages: Sequence[int]
    page_size: int

    @classmethod
    def choose(cls, max_rows: int, max_length: int, page_size: int) -> PromptBuckets:
        """Choose buckets for batches of up to `max_rows`, and prompts of up to `max_length`."""
        most = min(MAX_CAPTURED_TOKENS, max_length)
        return cls(
            (0, *_powers(_MIN_DECODE_ROWS, max_rows)),
            tuple(_powers(_MIN_TOKENS, most)),
            tuple(_page_sizes(-(-max_length // page_size))),
            page_size,
        )

    def fit(
        self, num_decode: int, num_chunks: int, num_tokens: int, num_pages: int
    ) -> Bucket | None:
        """Find the smallest bucket that holds `num_chunks` of `num_tokens` in all, or `None`."""
        decode_rows, tokens = (
            smallest(self.decode_rows, num_decode),
            smallest(self.tokens, num_tokens),
        )
        if decode_rows is None or tokens is None or num_chunks >= _CHUNKS:
            return None
        pages = smallest(self.pages, max(num_pages, -(-(tokens - num_tokens) // self.page_size)))
        if pages is None:
            return None
        return Bucket(decode_rows + _CHUNKS, decode_rows + tokens, pages, _CHUNKS)


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


def _powers(least: int, most: int) -> list[int]:
    """Powers of two from `least` on, and `most`."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= 2
    return [*sizes, most]


def _page_sizes(most: int) -> list[int]:
    sizes, size = [], _MIN_PAGES
    while size < most:
        sizes.append(size)
        size *= _PAGES_GROWTH
    return [*sizes, most]
