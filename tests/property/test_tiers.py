"""Pages that went to host memory or disk and came back are those of a cold run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.tiered_world import TieredWorld, drive_tiers
from support.tiers import first
from triptych.core.kv.parts import PagePart, PartKind
from triptych.core.kv.tiers.store import PageTiers
from triptych.schedulers.tokens.stored_pages import StoredPages


@pytest.mark.parametrize("seed", first(range(30), 10))
def test_every_answer_is_right_and_every_page_comes_back(seed: int, tmp_path: Path) -> None:
    """The shadow model: cancelled, preempted, paused and failed jobs, and a restart."""
    drive_tiers(seed, 250, tmp_path)


def test_the_worlds_hit_and_evict_in_every_tier(tmp_path: Path) -> None:
    lives = [life for seed in range(12) for life in drive_tiers(seed, 250, tmp_path / str(seed))]

    def total(name: str, worlds: list[TieredWorld]) -> float:
        return sum(life.counter(name) for life in worlds)

    for name in ("kv_host_page_hits_total", "kv_disk_page_hits_total", "preemptions_total"):
        assert total(name, lives) > 10, name
    assert total("kv_host_page_evictions_total", lives) > 10
    assert total("kv_disk_page_evictions_total", lives) > 10
    assert total("kv_disk_page_hits_total", lives[1::2]) > 0, "after a restart"


def saves_pages_that_nobody_holds(self: StoredPages) -> None:
    pool = self._pool
    keys = [key for kind, key in self._unsaved if kind is PartKind.FULL and key in pool._index]
    self._unsaved.clear()
    self._store.save([PagePart(key, pool._index[key]) for key in keys], lambda: None)


def copies_the_page_before(self: PageTiers, part: PagePart) -> None:
    _copy(self, part._replace(number=max(0, part.number - 1)))


_copy = PageTiers._copy
_FAULTS: list[tuple[type, str, Callable[..., Any]]] = [
    (StoredPages, "_save", saves_pages_that_nobody_holds),
    (PageTiers, "_copy", copies_the_page_before),
    (PageTiers, "_drop", lambda self, keys: None),
]


@pytest.mark.parametrize(("owner", "name", "fault"), _FAULTS[:2])
def test_the_driver_stumbles_over_a_fault(
    owner: type, name: str, fault: Callable[..., Any], monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises((AssertionError, KeyError, ValueError)):  # noqa: PT012 (whichever it is)
        for seed in range(10):
            drive_tiers(seed, 150, tmp_path / str(seed))
