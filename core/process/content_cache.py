"""A cache of values computed from content, such as voices and features, by content digest.

Owns one least-recently-used order and its budget of bytes and entries. Knows neither the values nor
their origin. A referenced value is never evicted, so an insert never fails: while all values are
referenced the cache may exceed its budget, and shrinks as references are released.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(slots=True)
class _CacheEntry(Generic[Value]):
    value: Value
    num_bytes: int
    num_references: int = 0


class ContentCache(Generic[Value]):
    """At most `capacity_bytes` in `max_entries` values; its owner books them in the ledger.

    Stores the result of `copy(value)`, so that a slice does not keep its whole buffer alive and
    callers cannot change the cached value. Thread-safe.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        copy: Callable[[Value], Value],
        max_entries: int = sys.maxsize,
    ) -> None:
        if capacity_bytes < 0 or max_entries < 0:
            raise ValueError("capacity_bytes and max_entries must not be negative")
        self.capacity_bytes = capacity_bytes
        self.max_entries = max_entries
        self._copy = copy
        self._entries: OrderedDict[Hashable, _CacheEntry[Value]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_references(self) -> int:
        """References not yet released."""
        with self._lock:
            return sum(entry.num_references for entry in self._entries.values())

    def acquire(self, key: Hashable) -> Value | None:
        """The value, referenced until `release`; `None`, without a reference, if absent."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            return self._reference(key, entry)

    def insert(self, key: Hashable, value: Value, num_bytes: int) -> Value:
        """Store `value` unless `key` has one; return the stored one, referenced until `release`."""
        owned = self._copy(value)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _CacheEntry(owned, num_bytes)
                self._num_bytes += num_bytes
            kept = self._reference(key, entry)
            self._shrink()
        return kept

    def release(self, key: Hashable) -> None:
        """Release one reference."""
        with self._lock:
            entry = self._entries[key]
            assert entry.num_references, f"{key!r} is released more often than acquired"
            entry.num_references -= 1
            self._shrink()

    def clear(self) -> None:
        """Drop all unreferenced values."""
        with self._lock:
            self._drop(lambda: True)

    def check(self) -> None:
        """Assert that totals and entries agree."""
        with self._lock:
            assert self._num_bytes == sum(entry.num_bytes for entry in self._entries.values())
            idle = [entry for entry in self._entries.values() if not entry.num_references]
            assert not idle or not self._is_over, "unreferenced values exceed the budget"

    def _reference(self, key: Hashable, entry: _CacheEntry[Value]) -> Value:
        entry.num_references += 1
        self._entries.move_to_end(key)
        return entry.value

    def _shrink(self) -> None:
        self._drop(lambda: self._is_over)

    @property
    def _is_over(self) -> bool:
        return self._num_bytes > self.capacity_bytes or len(self._entries) > self.max_entries

    def _drop(self, is_needed: Callable[[], bool]) -> None:
        """Drop unreferenced values, the least recently used first, while `is_needed()`."""
        idle = [key for key, entry in self._entries.items() if not entry.num_references]
        for key in idle:
            if not is_needed():
                return
            self._num_bytes -= self._entries.pop(key).num_bytes
