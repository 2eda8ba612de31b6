"""The pages of a tier: where each lies, and which one gives way first.

Owns the order of use. Knows neither memory nor files. Pinned pages are outside the order: they
never give way.
"""

from __future__ import annotations

from collections import OrderedDict


class PageOrder:
    """Places of pages by key. One thread changes it; others may ask whether a key is there."""

    def __init__(self) -> None:
        self._places: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._pinned: dict[bytes, int] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._places or key in self._pinned

    def __len__(self) -> int:
        return len(self._places) + len(self._pinned)

    @property
    def num_pinned(self) -> int:
        """Pages that never give way."""
        return len(self._pinned)

    @property
    def oldest(self) -> bytes | None:
        """The page that gives way first; `None` if all are pinned."""
        return next(iter(self._places), None)

    def keys(self) -> tuple[bytes, ...]:
        """The keys of all pages."""
        return (*self._places, *self._pinned)

    def place(self, key: bytes) -> int | None:
        """The place of a page; `None` if it is not here."""
        place = self._places.get(key)
        return self._pinned.get(key) if place is None else place

    def add(self, key: bytes, place: int) -> None:
        """Add a page that is not here, as the most recently used one."""
        assert key not in self, "a page has one place"
        self._places[key] = place

    def touch(self, key: bytes) -> None:
        """Make a page the most recently used one, if it is here."""
        if key in self._places:
            self._places.move_to_end(key)

    def drop(self, key: bytes) -> int | None:
        """Remove a page, pinned or not, and return the place that it had."""
        place = self._places.pop(key, None)
        return self._pinned.pop(key, None) if place is None else place

    def pin(self, key: bytes) -> bool:
        """Take a page out of the order; returns whether it is here."""
        if key in self._places:
            self._pinned[key] = self._places[key]
            del self._places[key]
        return key in self._pinned

    def unpin(self, key: bytes) -> None:
        """Put a pinned page back into the order, as the most recently used one."""
        if key in self._pinned:
            self._places[key] = self._pinned[key]
            del self._pinned[key]
