"""What is remembered of prefixes, and what gives way."""

from __future__ import annotations

from triptych.core.router.prefix_index import PrefixIndex
from triptych.core.router.request import prefix_keys


def keys(head: int, num_tokens: int = 256) -> tuple[int, ...]:
    return prefix_keys(head, tuple(range(num_tokens)))


def index(capacity_tokens: int, max_keys: int = 100) -> PrefixIndex:
    found = PrefixIndex(max_keys)
    found.capacity_tokens = capacity_tokens
    return found


def test_holders_of_a_prefix() -> None:
    prefixes = index(10_000)
    prefixes.add(keys(0, 128), 0)
    prefixes.add(keys(0, 256), 2)
    assert prefixes.holders(keys(0, 256)) == [0b101, 0b101, 0b100]
    assert prefixes.holders(keys(1)) == []


def test_tokens_of_all_holders_are_within_the_caches() -> None:
    prefixes = index(512)
    prefixes.add(keys(0), 0)
    prefixes.add(keys(0), 1)
    assert len(prefixes) == 3
    prefixes.add(keys(1), 0)  # the oldest gives way, its long beginnings first
    assert prefixes.holders(keys(0)) == [] or len(prefixes.holders(keys(0))) < 3
    assert len(prefixes.holders(keys(1))) == 3


def test_tokens_of_the_dead_take_no_room() -> None:
    prefixes = index(512)
    prefixes.add(keys(0), 0)
    prefixes.add(keys(1), 1)
    prefixes.forget(0)
    prefixes.capacity_tokens = 256
    prefixes.add(keys(1), 1)
    assert len(prefixes.holders(keys(1))) == 3
    prefixes.capacity_tokens = 512
    prefixes.add(keys(2), 1)
    prefixes.add(keys(3), 1)  # of the second, which the dead held too, nothing is taken off twice
    assert len(prefixes.holders(keys(2))) == len(prefixes.holders(keys(3))) == 3


def test_what_is_used_stays() -> None:
    prefixes = index(768)
    for head in (0, 1, 2, 0, 3):
        prefixes.add(keys(head), 0)
    assert len(prefixes.holders(keys(0))) == 3
    assert prefixes.holders(keys(1)) == []


def test_keys_are_bounded_where_caches_are_not() -> None:
    prefixes = index(10**9, max_keys=9)
    for head in range(50):
        prefixes.add(keys(head), head)
    assert len(prefixes) == 9
    assert len(prefixes.holders(keys(49))) == 3
    prefixes.clear()
    assert len(prefixes) == 0
