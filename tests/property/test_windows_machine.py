"""Every row finds the tokens of its windows, whatever happens in whatever order.

The seeded driver of `test_pages_machine`, over a model whose window layers have pages of their own.
As there, faults that are put in must be noticed.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from support.token_driver import drive, random_windowed_world
from triptych.core.kv.pages import Lease, PagePool
from triptych.core.kv.parts import PartKind, PartRule
from triptych.core.kv.windows import WindowPages


def test_every_row_finds_its_windows() -> None:
    totals: Counter[str] = Counter()
    for seed in range(40):
        world = drive(seed, 400, random_windowed_world)
        assert world.runner.windows is not None
        totals.update(world.scheduler.stats().counters)
        totals["given_back"] += world.runner.windows.num_left
    assert min(totals.values()) > 20, totals


_leave = PagePool.leave_windows
_drop = WindowPages.drop


def leaves_a_page_too_early(pool: PagePool, lease: Lease, num_tokens: int) -> None:
    _leave(pool, lease, num_tokens + pool.page_size)


def leaves_before_commit(pool: PagePool, lease: Lease, num_pages: int) -> None:
    if pool.windows is not None:
        for page_id in lease.page_ids[len(lease.window_ids) : num_pages]:
            lease.window_ids.append(pool.windows.take(page_id))
        _leave(pool, lease, num_pages * pool.page_size)


def finds_pages_without_windows(rule: PartRule, num_pages: int, has: Callable[..., bool]) -> int:
    return max((n + 1 for n in range(num_pages) if has(PartKind.WINDOW, n)), default=0)


def frees_held_parts(windows: WindowPages, page_id: int, **given: Any) -> None:
    windows._num_holders[page_id] = 1
    _drop(windows, page_id, **given)


def keeps_parts_of_lost_pages(windows: WindowPages, page_id: int) -> None:
    pass


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (PagePool, "leave_windows", leaves_a_page_too_early),
        (PagePool, "extend_windows", leaves_before_commit),
        (PartRule, "depth", finds_pages_without_windows),
        (WindowPages, "drop", frees_held_parts),
        (WindowPages, "forget", keeps_parts_of_lost_pages),
    ],
)
def test_a_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, KeyError, IndexError)):  # noqa: PT012 - any of many worlds
        for seed in range(40):
            drive(seed, 300, random_windowed_world)
