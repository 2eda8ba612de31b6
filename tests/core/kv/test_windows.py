"""Pages of window layers: what is found, what is overwritten, and what a row gives back."""

from __future__ import annotations

import pytest

from support.page_keys import page_keys
from triptych.core.kv.pages import Lease, PagePool
from triptych.core.kv.windows import WindowSize

KEYS = page_keys(b"root", range(64), 4)


def pool_of(num_window_pages: int, *, reach: int = 2, num_pages: int = 12) -> PagePool:
    return PagePool(
        num_pages=num_pages, page_size=4, windows=WindowSize(num_window_pages, 2, reach)
    )


def computed(pool: PagePool, keys: list[bytes], num_pages: int = 0) -> Lease:
    """A row of so many pages, computed as far as `keys` in one step."""
    lease = pool.acquire(keys)
    pool.extend(lease, max(num_pages, len(keys)) - len(lease))
    pool.extend_windows(lease, len(keys))
    pool.publish(lease, keys[lease.num_published :])
    pool.leave_windows(lease, 4 * len(keys))
    pool.check()
    return lease


def test_a_step_takes_pages_and_a_row_keeps_those_of_its_window() -> None:
    pool = pool_of(8)
    lease = computed(pool, KEYS[:6], 8)
    assert (lease.first_window, len(lease.window_ids), len(lease)) == (4, 6, 8)
    assert pool.windows is not None
    assert pool.windows.gauges() == {"kv_window_pages": 8, "kv_window_pages_leased": 2}
    assert lease.windows_from(0) == tuple(lease.window_ids[4:])
    pool.leave_windows(lease, 4 * 6 + 3)
    assert lease.first_window == 4, "a row may begin again at its current page"
    pool.release(lease)
    pool.check()
    assert pool.windows.num_available == 8


@pytest.mark.parametrize(("window", "reach"), [(1, 0), (2, 1), (5, 1), (6, 2), (64, 16)])
def test_the_first_token_of_a_page_sees_pages_before_it(window: int, reach: int) -> None:
    size = WindowSize.least(window, 4, num_rows=3, step_tokens=10)
    assert (size.reach, size.num_pages) == (reach, 3 * (reach + 2) + 3)


def test_a_hit_needs_the_window_of_its_next_token() -> None:
    pool = pool_of(8)
    pool.release(computed(pool, KEYS[:6]))
    assert [len(pool.peek(KEYS[:n])) for n in (6, 5, 4, 1)] == [6, 5, 4, 1]
    lease = computed(pool, page_keys(b"other", range(64), 4)[:5])  # overwrites those left last
    assert [len(pool.peek(KEYS[:n])) for n in (6, 5, 4, 1)] == [6, 1, 1, 1]
    pool.release(lease)
    pool.check()


def test_pages_computed_again_take_the_place_of_those_without_a_window() -> None:
    pool = pool_of(6)
    pool.release(computed(pool, KEYS[:4]))
    pool.release(computed(pool, page_keys(b"other", range(64), 4)[:6]))
    assert pool.num_indexed(KEYS[:4]) == 4
    assert not pool.peek(KEYS[:4])
    lease = computed(pool, KEYS[:4])
    assert pool.peek(KEYS[:4]) == lease.page_ids
    pool.release(lease)
    pool.check()


def test_what_two_rows_hold_is_kept_until_both_leave() -> None:
    pool = pool_of(8)
    first = computed(pool, KEYS[:3])
    second = pool.acquire(KEYS[:3])
    assert second.windows_from(0) == first.windows_from(0)
    pool.release(first)
    assert pool.windows is not None
    assert pool.windows.num_available == 6
    pool.release(second)
    assert pool.windows.num_available == 8
    pool.forget_all()
    pool.check()
    assert not any(map(pool.windows.has, range(12)))
