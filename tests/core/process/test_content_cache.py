"""The content cache against a plain account of who holds what, whatever is asked of it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triptych.core.process.content_cache import ContentCache

KEYS = st.integers(0, 9)
CAPACITY = 100


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache: ContentCache[list[int]] = ContentCache(CAPACITY, copy=list)
        self.sizes: dict[int, int] = {}
        self.held: Counter[int] = Counter()
        self.used: list[int] = []  # the most recent last

    def use(self, key: int) -> None:
        if key in self.used:
            self.used.remove(key)
        self.used.append(key)
        self.held[key] += 1

    def expect_drops(self) -> None:
        for key in [*self.used]:
            if sum(self.sizes.values()) <= CAPACITY:
                return
            if not self.held[key]:
                self.used.remove(key)
                del self.sizes[key]

    @rule(key=KEYS, size=st.integers(0, 150))
    def insert(self, key: int, size: int) -> None:
        mine = [key]
        kept = self.cache.insert(key, mine, size)
        assert kept == [key]
        assert kept is not mine
        self.sizes.setdefault(key, size)
        self.use(key)
        self.expect_drops()

    @rule(key=KEYS)
    def acquire(self, key: int) -> None:
        value = self.cache.acquire(key)
        assert (value == [key]) == (key in self.sizes)
        if key in self.sizes:
            self.use(key)

    @precondition(lambda self: self.held.total())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held.elements())))
        self.cache.release(key)
        self.held[key] -= 1
        self.expect_drops()

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.used = [key for key in self.used if self.held[key]]
        self.sizes = {key: self.sizes[key] for key in self.used}

    @invariant()
    def holds_what_the_account_says(self) -> None:
        self.cache.check()
        assert self.cache.num_bytes == sum(self.sizes.values())
        assert list(self.cache._entries) == self.used


TestContentCache = CacheMachine.TestCase


def test_a_value_in_use_outlives_the_budget() -> None:
    cache: ContentCache[bytes] = ContentCache(10, copy=bytes)
    first = cache.insert("a", b"x" * 8, 8)
    cache.insert("b", b"y" * 8, 8)
    assert cache.num_bytes == 16
    assert cache.acquire("a") is first
    cache.release("b")
    assert cache.acquire("b") is None
    assert cache.num_bytes == 8


def test_a_budget_of_nothing_keeps_what_is_in_use_alone() -> None:
    cache: ContentCache[bytes] = ContentCache(0, copy=bytes)
    cache.insert("a", b"x", 1)
    cache.release("a")
    assert cache.num_bytes == 0
    with pytest.raises(ValueError, match="negative"):
        ContentCache(-1, copy=bytes)


def test_a_cache_is_bounded_in_entries_too() -> None:
    cache: ContentCache[str] = ContentCache(100, copy=str, max_entries=2)
    for key in "abc":
        cache.insert(key, key, 1)
        assert cache.num_references == 1
        cache.release(key)
        cache.check()
    assert len(cache) == 2
    assert cache.acquire("a") is None


def test_without_entries_values_last_while_they_are_in_use() -> None:
    cache: ContentCache[str] = ContentCache(100, copy=str, max_entries=0)
    cache.insert("a", "a", 1)
    assert cache.acquire("a") == "a"
    cache.release("a")
    cache.release("a")
    cache.check()
    assert len(cache) == 0
