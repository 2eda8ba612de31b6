"""Snapshots of rows' states at the ends of pages, for models with recurrent layers.

Owns snapshot ids and the index by page key. Knows neither pages nor tensors: a snapshot is a
number, and its key that of the page after which the state was.

A cached page of such a model is of use only if a state is known at its end or at the end of a later
page: the layers that read pages can go on anywhere, the recurrent ones cannot.

Every snapshot is in exactly one place: free, pending (a step in flight writes it) or indexed (the
least recently used is overwritten first). Steps run in order on the device. So an indexed snapshot
may be overwritten by a later step than the one that reads it, and needs no holders.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class SnapshotIndex:
    """Snapshots `0 .. num_snapshots - 1`."""

    def __init__(self, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._index: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._pending: set[int] = set()
        self._found: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def has_free(self) -> bool:
        """Whether `take` overwrites none that is indexed."""
        return bool(self._free)

    @property
    def num_pending(self) -> int:
        """Snapshots that steps in flight write."""
        return len(self._pending)

    def depth(self, keys: Sequence[bytes]) -> int:
        """The number of leading pages up to the last one with a snapshot at its end."""
        for num_pages in range(len(keys), 0, -1):
            if keys[num_pages - 1] in self._index:
                return num_pages
        return 0

    def find(self, key: bytes) -> int:
        """The snapshot of `key`, which is indexed; it becomes the most recently used one."""
        self._index.move_to_end(key)
        self._found.add(key)
        return self._index[key]

    def is_found(self, key: bytes) -> bool:
        """Whether a row began from the snapshot of `key`."""
        return key in self._found

    def take(self) -> int | None:
        """A snapshot to be written, pending; the least recently used one if none is free."""
        if self._free:
            snapshot = self._free.pop()
        elif self._index:
            key, snapshot = self._index.popitem(last=False)
            self._found.discard(key)
        else:
            return None
        self._pending.add(snapshot)
        return snapshot

    def publish(self, snapshot: int, key: bytes) -> bool:
        """Index a pending snapshot: its step is over; false if one with its key is kept instead."""
        self._pending.remove(snapshot)
        if key in self._index:
            self._free.append(snapshot)
            return False
        self._index[key] = snapshot
        return True

    def give_back(self, snapshot: int) -> None:
        """Free a pending snapshot that was not written, or is not trusted."""
        self._pending.remove(snapshot)
        self._free.append(snapshot)

    def drop(self, key: bytes) -> None:
        """Free the snapshot of `key`, if there is one."""
        snapshot = self._index.pop(key, None)
        if snapshot is not None:
            self._found.discard(key)
            self._free.append(snapshot)

    def check(self) -> None:
        """Assert that every snapshot is in one place."""
        places = [*self._free, *self._pending, *self._index.values()]
        assert sorted(places) == list(range(self.num_snapshots)), "a snapshot is lost"
        assert self._found <= self._index.keys(), "a snapshot that is gone was found"
