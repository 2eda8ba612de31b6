"""Ten seeded faults: would the random driver notice if the allocator were wrong?

Each fault replaces one method by a slightly wrong one; the driver that passes without faults must
then stumble. A fault that survives says that the driver is blind somewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from support.token_driver import drive, random_world
from triptych.core.engine_api.plan import Plan
from triptych.core.kv import keys
from triptych.core.kv.pages import Lease, PagePool
from triptych.schedulers.base import Proposal
from triptych.schedulers.tokens import batch as token_batch
from triptych.schedulers.tokens import state as token_state
from triptych.schedulers.tokens.scheduler import TokenScheduler
from triptych.schedulers.tokens.state import SequenceState, TokenState

_NUM_WORLDS = 60
_STUMBLES = (AssertionError, KeyError, IndexError, ValueError)

_release = PagePool.release
_acquire = PagePool.acquire
_evict = PagePool._evict
_admit = TokenState.admit
_book = TokenScheduler.book
_page_key = keys.page_key
_root_key = keys.root_key


def forgets_a_decrement(pool: PagePool, lease: Lease) -> None:
    shared = [page for page in lease.page_ids if pool._num_holders[page] > 1]
    _release(pool, lease)
    for page in shared[:1]:
        pool._num_holders[page] += 1


def frees_twice(pool: PagePool, lease: Lease) -> None:
    _release(pool, lease)
    for page in lease.page_ids[-1:]:
        if pool._keys[page] is None:
            pool._free.append(page)


def makes_held_pages_evictable(pool: PagePool, lease: Lease) -> None:
    _release(pool, lease)
    for page in lease.page_ids:
        if pool._num_holders[page] and page not in pool._cached:
            pool._cached[page] = None


def finds_without_pinning(pool: PagePool, found_keys: Sequence[bytes] = ()) -> Lease:
    lease = _acquire(pool, found_keys)
    for page in lease.page_ids:
        if pool._num_holders[page] == 1:
            pool._cached[page] = None
    return lease


def names_without_tenant(namespace: bytes, *, adapter: str = "", tenant: str = "") -> bytes:
    return _root_key(namespace, adapter=adapter)


def names_without_parent(parent: bytes, token_ids: Sequence[int], contents: bytes = b"") -> bytes:
    return _page_key(b"", token_ids, contents)


def publishes_before_commit(
    scheduler: TokenScheduler, proposal: Proposal, step_id: int, now_s: float
) -> Plan | None:
    plan = _book(scheduler, proposal, step_id, now_s)
    for row in scheduler._state.running:
        row.num_committed = row.num_tokens - row.num_unknown
        scheduler._state.publish(row)
    return plan


def takes_the_last_page_from_the_cache(row: SequenceState, page_size: int) -> list[bytes]:
    return row.keys[: row.num_known // page_size]


def shares_a_partial_page(state: TokenState, row: SequenceState) -> None:
    assert row.lease is not None
    num_pages = min(len(row.keys), state.pool.num_pages_for(row.num_committed))
    published = row.keys[row.lease.num_published : num_pages]
    state.pool.publish(row.lease, published)
    for key in published:
        state.computing.pop(key, None)


def evicts_the_newest(pool: PagePool) -> int:
    pool._cached.move_to_end(next(reversed(pool._cached)), last=False)
    return _evict(pool)


@dataclass(frozen=True)
class Fault:
    """`wrong` stands in for every one of `places`."""

    wrong: Callable[..., Any]
    places: tuple[tuple[Any, str], ...]


FAULTS = (
    Fault(forgets_a_decrement, ((PagePool, "release"),)),
    Fault(frees_twice, ((PagePool, "release"),)),
    Fault(makes_held_pages_evictable, ((PagePool, "release"),)),
    Fault(names_without_tenant, ((token_batch, "root_key"),)),
    Fault(names_without_parent, ((keys, "page_key"), (token_state, "page_key"))),
    Fault(publishes_before_commit, ((TokenScheduler, "book"),)),
    Fault(takes_the_last_page_from_the_cache, ((SequenceState, "lookup_keys"),)),
    Fault(shares_a_partial_page, ((TokenState, "publish"),)),
    Fault(evicts_the_newest, ((PagePool, "_evict"),)),
    Fault(finds_without_pinning, ((PagePool, "acquire"),)),
)


def is_caught(fault: Fault | None, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the driver stumbles in any of the worlds."""
    with monkeypatch.context() as patch:
        for owner, name in fault.places if fault else ():
            patch.setattr(owner, name, fault.wrong if fault else None)
        for seed in range(_NUM_WORLDS):
            try:
                drive(seed, 250, random_world)
            except _STUMBLES:
                return True
    return False


def test_without_a_fault_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_caught(None, monkeypatch)


def test_at_least_nine_of_ten_faults_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    caught = {fault.wrong.__name__: is_caught(fault, monkeypatch) for fault in FAULTS}
    assert len(caught) == 10
    assert sum(caught.values()) >= 9, caught
