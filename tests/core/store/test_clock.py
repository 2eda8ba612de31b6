"""Wall clocks that leap: nothing kept is lost by a leap that does not last, across restarts too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from triptych.core.store.clock import JUMP_LASTS_S
from triptych.core.store.documents import Document, DocumentTable, Key
from triptych.core.store.store import DocumentStore

DAY_S = 86400.0
TTL_S = 30 * DAY_S


class Clocks:
    """A wall clock that can be set, and the steady time behind it."""

    def __init__(self) -> None:
        self.steady_s = 500.0
        self.ahead_s = 1.7e9

    def wait(self, seconds: float) -> None:
        self.steady_s += seconds

    def leap(self, seconds: float) -> None:
        self.ahead_s += seconds

    def opened(self, place: str = "memory") -> DocumentStore:
        return DocumentStore(
            place,
            max_bytes=2**20,
            ttl_s=TTL_S,
            clock=lambda: self.steady_s + self.ahead_s,
            steady=lambda: self.steady_s,
        )


async def add(store: DocumentStore, name: str) -> None:
    await store.call(DocumentTable.add, Document(key=key(name), body=b"x"))


def key(name: str) -> Key:
    return Key("note", name, "ann")


async def is_kept(store: DocumentStore, name: str) -> bool:
    return await store.call(DocumentTable.get, key(name)) is not None


@pytest.mark.parametrize(
    "leaps",
    [(31 * DAY_S,), (10_000 * DAY_S,), (-31 * DAY_S,), (40 * DAY_S, -80 * DAY_S, 31 * DAY_S)],
    ids=["31 days", "27 years", "back", "to and fro"],
)
async def test_a_leap_that_does_not_last_expires_nothing(leaps: Sequence[float]) -> None:
    clocks = Clocks()
    store = clocks.opened()
    await add(store, "before")
    for leap in leaps:
        clocks.leap(leap)
        await add(store, f"during {leap}")
        for _ in range(5):
            clocks.wait(JUMP_LASTS_S / 10)
            assert await is_kept(store, "before")
    clocks.leap(-sum(leaps))
    clocks.wait(2 * JUMP_LASTS_S)
    for name in ("before", *(f"during {leap}" for leap in leaps)):
        assert await is_kept(store, name), name
    await store.close()


async def test_a_leap_that_lasts_is_believed() -> None:
    clocks = Clocks()
    store = clocks.opened()
    await add(store, "a")
    clocks.leap(31 * DAY_S)
    assert await is_kept(store, "a")
    clocks.wait(JUMP_LASTS_S)
    assert not await is_kept(store, "a")
    await store.close()


async def test_time_that_passes_expires_what_is_over_it() -> None:
    """However long nothing asks; and a clock that is put right by a little is believed at once."""
    clocks = Clocks()
    store = clocks.opened()
    await add(store, "a")
    clocks.wait(TTL_S - 10)
    assert await is_kept(store, "a")
    clocks.leap(20)
    assert not await is_kept(store, "a")
    await store.close()


@pytest.mark.parametrize(("away_s", "is_at_once"), [(DAY_S / 2, True), (40 * DAY_S, False)])
async def test_a_leap_between_two_processes(
    tmp_path: Path, away_s: float, is_at_once: bool
) -> None:
    """The machine's own steady clock begins again there."""
    clocks, place = Clocks(), str(tmp_path / "kept.db")
    store = clocks.opened(place)
    await add(store, "a")
    clocks.wait(TTL_S - DAY_S / 4)
    assert await is_kept(store, "a")  # which notes the time
    await store.close()
    clocks.leap(clocks.steady_s + away_s)
    clocks.steady_s = 3.0
    store = clocks.opened(place)
    assert await is_kept(store, "a") == (not is_at_once)
    clocks.wait(JUMP_LASTS_S)
    assert not await is_kept(store, "a")
    await store.close()
