"""The parts of a page, by the kind of layers that read them, and which of them a row needs.

Owns the kinds and the rule of a hit. Knows no memory: a part has a number within its kind.

A page of the pool stands for some tokens of a row. Layers that see all of them keep its `FULL`
part, layers with a window the `WINDOW` part where they have pages of their own (`core.kv.windows`),
and recurrent layers the row's `STATE` after it (`core.kv.snapshots`). A model has one or more of
these kinds. The pool, lower tiers and transfers between engines work on their list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class PartKind(IntEnum):
    """The layers that read a part of a page."""

    FULL = 0
    WINDOW = 1
    STATE = 2


class PagePart(NamedTuple):
    """A part of the page of `key`: `number` is its place in the memory of its kind."""

    key: bytes
    number: int
    kind: PartKind = PartKind.FULL


@dataclass(frozen=True, slots=True)
class PartRule:
    """The kinds of parts in a model, and which of them a row needs to go on after some pages.

    `reach` is given where window layers have pages of their own: a row's next token sees that many
    pages back.
    """

    has_full: bool = True
    reach: int | None = None
    has_states: bool = False

    @property
    def is_divided(self) -> bool:
        """Whether a row needs other parts than those of layers that see all tokens."""
        return self.reach is not None or self.has_states

    def ends(self, num_pages: int, first: int = 0) -> list[tuple[PartKind, int]]:
        """The parts that a row needs to go on after `num_pages`, apart from full ones.

        They are kinds and pages, from page `first` on.
        """
        found: list[tuple[PartKind, int]] = []
        if self.reach is not None:
            seen = range(max(first, num_pages - self.reach), num_pages)
            found += [(PartKind.WINDOW, page) for page in seen]
        if self.has_states and num_pages:
            found.append((PartKind.STATE, num_pages - 1))
        return found

    def needed(self, num_pages: int, first: int = 0) -> list[tuple[PartKind, int]]:
        """All parts that a row needs to go on after `num_pages`: as `ends`, after full ones."""
        full = range(first, num_pages if self.has_full else first)
        return [*((PartKind.FULL, page) for page in full), *self.ends(num_pages, first)]

    def depth(self, num_pages: int, has: Callable[[PartKind, int], bool]) -> int:
        """The most of `num_pages` leading pages after which a row can go on.

        Their full parts are known; `has(kind, page)` says which others are.
        """
        last = -1
        while num_pages != last:
            last = page = num_pages
            while page > max(0, num_pages - (self.reach or 0)):
                page -= 1
                if not has(PartKind.WINDOW, page):
                    num_pages = page
            while self.has_states and num_pages and not has(PartKind.STATE, num_pages - 1):
                num_pages -= 1
        return num_pages
