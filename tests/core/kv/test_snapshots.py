"""Snapshots of states: what is found, what is overwritten, and pages up to a known state."""

import pytest

from support.page_keys import page_keys
from triptych.core.kv.pages import PagePool
from triptych.core.kv.parts import PartRule
from triptych.core.kv.snapshots import SnapshotIndex

KEYS = page_keys(b"root", range(64), 4)


def saved(index: SnapshotIndex, *keys: bytes) -> list[int]:
    """The snapshots that `keys` were saved in."""
    taken = []
    for key in keys:
        snapshot = index.take()
        assert snapshot is not None
        index.publish(snapshot, key)
        taken.append(snapshot)
    index.check()
    return taken


def test_the_longest_prefix_with_a_known_state_counts() -> None:
    index = SnapshotIndex(4)
    saved(index, KEYS[1], KEYS[4])
    rule = PartRule(has_states=True)
    found = [rule.depth(n, lambda kind, page: KEYS[page] in index) for n in range(7)]
    assert found == [0, 0, 2, 2, 2, 5, 5]


def test_the_least_recently_used_is_overwritten_first() -> None:
    index = SnapshotIndex(2)
    first, second = saved(index, KEYS[0], KEYS[1])
    assert index.find(KEYS[0]) == first
    index.let_go(first)
    assert index.take() == second
    assert [key in index for key in KEYS[:2]] == [True, False]
    assert index.take() == first
    assert index.take() is None


def test_a_pending_snapshot_is_not_found_until_it_is_published() -> None:
    index = SnapshotIndex(2)
    snapshot = index.take()
    assert snapshot is not None
    assert KEYS[0] not in index
    index.check()
    assert index.publish(snapshot, KEYS[0])
    again = index.take()
    assert again is not None
    assert not index.publish(again, KEYS[0])  # the first is kept
    assert index.find(KEYS[0]) == snapshot
    assert index.take() == again
    index.let_go(snapshot)
    index.give_back(again)
    index.drop(KEYS[0])
    index.drop(KEYS[0])
    index.check()
    assert len(index) == 0


def test_a_held_snapshot_is_not_overwritten() -> None:
    index = SnapshotIndex(2)
    first, second = saved(index, KEYS[0], KEYS[1])
    assert index.hold(KEYS[0]) == first
    assert index.take() == second
    assert (index.take(), index.can_take, index.has_free) == (None, False, False)
    index.drop(KEYS[0])
    index.check()
    assert index.take() is None
    index.let_go(first)
    index.check()
    assert index.take() == first


def test_a_spare_snapshot_is_overwritten_first_until_it_is_found() -> None:
    index = SnapshotIndex(3)
    saved(index, KEYS[0])
    for key in KEYS[1:3]:
        spare = index.take_spare()
        assert spare is not None
        index.publish(spare, key, is_spare=True)
    index.let_go(index.find(KEYS[1]))
    index.check()
    assert index.has_free
    assert index.take() is not None
    assert [key in index for key in KEYS[:3]] == [True, True, False]
    assert not index.has_free
    assert index.take_spare() is None
    index.spare(KEYS[1])  # it was found
    assert not index.has_free
    index.spare(KEYS[0])
    assert index.take_spare() is not None
    assert [key in index for key in KEYS[:3]] == [False, True, False]
    index.check()


def test_a_spare_snapshot_that_is_saved_for_a_row_is_spare_no_longer() -> None:
    index = SnapshotIndex(2)
    for is_spare in (True, False):
        snapshot = index.take()
        assert snapshot is not None
        index.publish(snapshot, KEYS[0], is_spare=is_spare)
    saved(index, KEYS[1])
    assert not index.has_free
    assert KEYS[0] in index


def test_a_lost_snapshot_is_noticed() -> None:
    index = SnapshotIndex(2)
    index._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        index.check()


def test_pages_are_found_up_to_the_last_known_state() -> None:
    pool = PagePool(num_pages=8, page_size=4, num_snapshots=2)
    assert pool.snapshots is not None
    lease = pool.acquire()
    pool.extend(lease, 4)
    pool.publish(lease, KEYS[:4])
    assert pool.peek(KEYS) == []
    (snapshot,) = saved(pool.snapshots, KEYS[2])
    assert pool.peek(KEYS) == lease.page_ids[:3]
    assert pool.num_indexed(KEYS) == 4
    mate = pool.acquire(KEYS)
    assert (mate.page_ids, mate.snapshot) == (lease.page_ids[:3], snapshot)
    assert pool.snapshots.is_found(KEYS[2])
    pool.unpublish(mate, KEYS[:3])
    assert pool.peek(KEYS) == []
    pool.check()
