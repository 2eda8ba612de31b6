"""The page pool: leases, sharing, eviction, audit."""

import pytest

from support.page_keys import page_keys
from triptych.core.kv.pages import Lease, PagePool

KEYS = page_keys(b"root", range(64), 4)


def pool(num_pages: int = 6, *, enable_prefix_caching: bool = True) -> PagePool:
    return PagePool(num_pages=num_pages, page_size=4, enable_prefix_caching=enable_prefix_caching)


def leased(pages: PagePool, num_pages: int, num_published: int = 0) -> Lease:
    lease = pages.acquire()
    pages.extend(lease, num_pages)
    pages.publish(lease, KEYS[:num_published])
    pages.check()
    return lease


def counts(pages: PagePool) -> tuple[int, int, int]:
    pages.check()
    return pages.num_free, pages.num_cached, pages.num_leased


def test_pages_go_out_and_come_back() -> None:
    pages = pool()
    lease = leased(pages, 4)
    assert len(set(lease.page_ids)) == 4
    assert counts(pages) == (2, 0, 4)
    pages.release(lease)
    assert counts(pages) == (6, 0, 0)


def test_a_lease_ends_once() -> None:
    pages = pool()
    lease = leased(pages, 1)
    pages.release(lease)
    with pytest.raises(AssertionError, match="exactly once"):
        pages.release(lease)
    for use in (
        lambda: pages.extend(lease, 1),
        lambda: pages.publish(lease, ()),
        lambda: pages.unpublish(lease),
    ):
        with pytest.raises(AssertionError, match="has ended"):
            use()


def test_no_more_is_handed_out_than_there_is() -> None:
    pages = pool(2)
    with pytest.raises(AssertionError, match="room"):
        leased(pages, 3)


def test_published_pages_stay_findable_and_are_shared() -> None:
    pages = pool()
    first = leased(pages, 3, num_published=2)
    second = pages.acquire(KEYS[:5])
    assert second.page_ids == first.page_ids[:2]
    assert pages.num_holders(first.page_ids[0]) == 2
    pages.release(first)
    assert counts(pages) == (4, 0, 2)
    pages.release(second)
    assert counts(pages) == (4, 2, 0)
    assert pages.acquire(KEYS).page_ids == second.page_ids
    assert pages.counters.num_hits == 4
    pages.check()


def test_an_unpublished_page_is_never_found() -> None:
    pages = pool()
    leased(pages, 3)
    assert pages.peek(KEYS) == []


def test_a_chain_is_found_up_to_its_first_gap() -> None:
    pages = pool()
    lease = leased(pages, 3, num_published=3)
    assert pages.peek([KEYS[0], KEYS[7], KEYS[2]]) == lease.page_ids[:1]


def test_found_pages_are_pinned_by_finding_them() -> None:
    pages = pool(3)
    pages.release(leased(pages, 2, num_published=2))
    lease = pages.acquire(KEYS)
    assert pages.num_available == 1
    leased(pages, 1)
    assert pages.peek(KEYS) == lease.page_ids


def test_the_page_used_longest_ago_is_evicted_first_and_ends_before_beginnings() -> None:
    pages = pool(4)
    pages.release(leased(pages, 2, num_published=2))
    other = pages.acquire()
    pages.extend(other, 2)
    pages.publish(other, page_keys(b"other", range(8), 4))
    pages.release(other)
    pages.release(pages.acquire(KEYS[:1]))  # the first page was used again
    for expected in (1, 1, 1, 0):
        leased(pages, 1)
        assert len(pages.peek(KEYS)) == expected
    assert pages.counters.num_evictions == 4
    assert counts(pages) == (0, 0, 4)


def test_free_pages_are_taken_before_cached_ones() -> None:
    pages = pool(3)
    pages.release(leased(pages, 2, num_published=2))
    leased(pages, 1)
    assert pages.counters.num_evictions == 0
    assert len(pages.peek(KEYS)) == 2


def test_of_equal_pages_the_first_stays() -> None:
    pages = pool()
    first = leased(pages, 2, num_published=2)
    second = leased(pages, 2, num_published=2)
    assert pages.counters.num_duplicates == 2
    assert pages.peek(KEYS) == first.page_ids
    pages.release(second)
    assert counts(pages) == (4, 0, 2)
    pages.release(first)
    assert counts(pages) == (4, 2, 0)


def test_a_forgotten_page_is_free_when_its_holders_are_gone() -> None:
    pages = pool()
    first = leased(pages, 3, num_published=2)
    second = pages.acquire(KEYS[:1])
    pages.unpublish(first)
    assert pages.peek(KEYS) == []
    pages.release(first)
    pages.release(second)
    assert counts(pages) == (6, 0, 0)


def test_only_held_pages_are_published() -> None:
    pages = pool()
    with pytest.raises(AssertionError, match="more keys"):
        leased(pages, 1, num_published=2)


def test_without_prefix_caching_nothing_is_found() -> None:
    pages = pool(enable_prefix_caching=False)
    lease = leased(pages, 2, num_published=2)
    assert pages.peek(KEYS) == []
    pages.release(lease)
    assert counts(pages) == (6, 0, 0)


def test_pages_for_tokens_round_up() -> None:
    assert [pool().num_pages_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "damage",
    [
        lambda pages, lease: pages._free.append(lease.page_ids[0]),
        lambda pages, lease: pages._free.pop(),
        lambda pages, lease: pages._free.append(pages._free[-1]),
        lambda pages, lease: lease.page_ids.append(lease.page_ids[0]),
        lambda pages, lease: lease.page_ids.pop(),
        lambda pages, lease: pages._leases.remove(lease),
        lambda pages, lease: pages._index.clear(),
        lambda pages, lease: pages._cached.update({lease.page_ids[0]: None}),
        lambda pages, lease: pages._cached.update({pages._free[-1]: None}),
        lambda pages, lease: setattr(lease, "num_published", 9),
    ],
)
def test_the_audit_notices_damage(damage: object) -> None:
    pages = pool()
    lease = leased(pages, 3, num_published=1)
    damage(pages, lease)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        pages.check()
