"""Snapshots of rows' states at the ends of pages, for models with recurrent layers.

Owns snapshot ids and the index by page key. Knows neither pages nor tensors: a snapshot is a
number, and its key that of the page after which the state was.

A cached page of such a model is of use only if a state is known at its end or at the end of a later
page: the layers that read pages can go on anywhere, the recurrent ones cannot.

Every snapshot is in exactly one place: free, pending (a step or a copy writes it), indexed, or
left (held, but no longer indexed). A step that begins with a snapshot holds it, and so does a copy
to another memory: held ones are not overwritten. Of the others, spare ones, which perhaps no row
needs, are overwritten first, then the least recently used.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable


class SnapshotIndex:
    """Snapshots `0 .. num_snapshots - 1`."""

    def __init__(self, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._index: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._spares: OrderedDict[bytes, None] = OrderedDict()  # of the indexed, oldest first
        self._pending: set[int] = set()
        self._left: set[int] = set()
        self._found: set[bytes] = set()
        self._num_holds: Counter[int] = Counter()

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def has_free(self) -> bool:
        """Whether `take` overwrites at most a spare one."""
        return bool(self._free) or self._oldest(self._spares) is not None

    @property
    def can_take(self) -> bool:
        """Whether `take` gives a snapshot."""
        return bool(self._free) or self._oldest(self._index) is not None

    @property
    def num_pending(self) -> int:
        """Snapshots that steps in flight or copies write."""
        return len(self._pending)

    @property
    def num_holds(self) -> int:
        """Calls of `find` and `hold` without `let_go`."""
        return self._num_holds.total()

    def find(self, key: bytes) -> int:
        """Hold the snapshot of `key` for a row; it becomes the most recently used one."""
        self._index.move_to_end(key)
        self._spares.pop(key, None)
        self._found.add(key)
        return self.hold(key)

    def hold(self, key: bytes) -> int:
        """Keep the snapshot of `key`, which is indexed, as it is until `let_go`; returns it."""
        snapshot = self._index[key]
        self._num_holds[snapshot] += 1
        return snapshot

    def let_go(self, snapshot: int) -> None:
        """End a hold."""
        assert self._num_holds[snapshot], "the snapshot is not held"
        self._num_holds[snapshot] -= 1
        if snapshot in self._left and not self._num_holds[snapshot]:
            self._left.remove(snapshot)
            self._free.append(snapshot)

    def is_found(self, key: bytes) -> bool:
        """Whether a row began from the snapshot of `key`."""
        return key in self._found

    def take(self) -> int | None:
        """A snapshot to be written, pending; the least recently used one if none is free.

        `None` if all are held or pending.
        """
        if not self.has_free and (key := self._oldest(self._index)) is not None:
            self.drop(key)
        return self.take_spare()

    def take_spare(self) -> int | None:
        """As `take`, without overwriting any but the oldest spare one."""
        if not self._free and (key := self._oldest(self._spares)) is not None:
            self.drop(key)
        if not self._free:
            return None
        snapshot = self._free.pop()
        self._pending.add(snapshot)
        return snapshot

    def publish(self, snapshot: int, key: bytes, *, is_spare: bool = False) -> bool:
        """Index a pending snapshot: its step is over; false if one with its key is kept instead."""
        self._pending.remove(snapshot)
        if not is_spare:
            self._spares.pop(key, None)
        if key in self._index:
            self._free.append(snapshot)
            return False
        self._index[key] = snapshot
        if is_spare:
            self._spares[key] = None
        return True

    def spare(self, key: bytes) -> None:
        """Let the snapshot of `key`, if any, be overwritten first, unless a row found it."""
        if key in self._index and key not in self._found:
            self._spares[key] = None

    def give_back(self, snapshot: int) -> None:
        """Free a pending snapshot that was not written, or is not trusted."""
        self._pending.remove(snapshot)
        self._free.append(snapshot)

    def drop(self, key: bytes) -> None:
        """Free the snapshot of `key`, if there is one; a held one once it is let go."""
        snapshot = self._index.pop(key, None)
        if snapshot is not None:
            self._found.discard(key)
            self._spares.pop(key, None)
            if self._num_holds[snapshot]:
                self._left.add(snapshot)
            else:
                self._free.append(snapshot)

    def _oldest(self, keys: Iterable[bytes]) -> bytes | None:
        """The first of indexed `keys` whose snapshot may be overwritten."""
        return next((key for key in keys if not self._num_holds[self._index[key]]), None)

    def check(self) -> None:
        """Assert that every snapshot is in one place."""
        places = [*self._free, *self._pending, *self._index.values(), *self._left]
        held = {snapshot for snapshot, num_holds in self._num_holds.items() if num_holds}
        assert held.isdisjoint((*self._free, *self._pending)), "a held snapshot may be overwritten"
        assert self._left <= held, "a snapshot is held by nothing"
        assert sorted(places) == list(range(self.num_snapshots)), "a snapshot is lost"
        assert self._found <= self._index.keys(), "a snapshot that is gone was found"
        assert self._spares.keys() <= self._index.keys() - self._found, "a spare one is of use"
