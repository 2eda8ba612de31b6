"""What was computed from content, kept by the content's digest: voices, features.

Owns one least-recently-used order and its budget of bytes and entries. Knows neither what it keeps
nor where it came from. A value in use is referenced and is never dropped, so an insert never fails:
while everything is in use the cache holds more than its budget, and shrinks as references are
released.
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

    Values are kept as `copy` makes them: a slice never keeps the whole alive, and a caller cannot
    change them. Thread-safe.
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
        """References that are not released."""
        with self._lock:
            return sum(entry.num_references for entry in self._entries.values())

    def acquire(self, key: Hashable) -> Value | None:
        """The value, referenced until `release`; `None`, without a reference, where it is not."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            return self._reference(key, entry)

    def insert(self, key: Hashable, value: Value, num_bytes: int) -> Value:
        """Keep `value` unless `key` has one; returns what is kept, referenced until `release`."""
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
        """Give back one reference."""
        with self._lock:
            entry = self._entries[key]
            assert entry.num_references, f"{key!r} is released more often than acquired"
            entry.num_references -= 1
            self._shrink()

    def clear(self) -> None:
        """Drop everything that is not in use."""
        with self._lock:
            self._drop(lambda: True)

    def check(self) -> None:
        """Assert that the books balance."""
        with self._lock:
            assert self._num_bytes == sum(entry.num_bytes for entry in self._entries.values())
            idle = [entry for entry in self._entries.values() if not entry.num_references]
            assert not idle or not self._is_over, "it holds more than it may"

    def _reference(self, key: Hashable, entry: _CacheEntry[Value]) -> Value:
        entry.num_references += 1
        self._entries.move_to_end(key)
        return entry.value

    def _shrink(self) -> None:
        self._drop(lambda: self._is_over)

    @property
    def _is_over(self) -> bool:
        return self._num_bytes > self.capacity_bytes or len(self._entries) > self.max_entries

    def _drop(self, goes_on: Callable[[], bool]) -> None:
        """Drop what is not in use, the least recently used first, while `goes_on`."""
        idle = [key for key, entry in self._entries.items() if not entry.num_references]
        for key in idle:
            if not goes_on():
                return
            self._num_bytes -= self._entries.pop(key).num_bytes
