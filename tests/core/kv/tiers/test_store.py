"""Pages between device, host memory and disk, on the tiers' thread."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from support.page_peers import FORMAT, KEYS, PAGE_BYTES, ByteMemory, Fetched, content
from triptych.core.kv.parts import PagePart, PartKind
from triptych.core.kv.tiers.disk import DiskTier
from triptych.core.kv.tiers.host import HostTier
from triptych.core.kv.tiers.store import PageTiers, Shelf

FULL = PartKind.FULL


def fetch_of(num_pages: int, first: int = 0) -> Fetched:
    """A fetch whose pages arrive several at a time."""
    fetched = Fetched(num_pages, first)
    fetched.fetch.arrived = lambda num: setattr(fetched, "num_arrived", num)
    return fetched


class Tiers:
    """Tiers over pages as bytes, with room for `host_pages` in host memory."""

    def __init__(self, host_pages: int = 4, folder: Path | None = None) -> None:
        self.memory = ByteMemory()
        self.disk = None if folder is None else DiskTier(folder, FORMAT, 0)
        self.host = HostTier(host_pages * PAGE_BYTES, PAGE_BYTES)
        self.tiers = PageTiers({FULL: Shelf(self.memory, self.host, self.disk)})

    def work(self) -> None:
        while self.tiers.has_work:
            work = self.tiers.next_work()
            assert work is not None
            work()

    def save(self, *numbers: int) -> None:
        """Save pages of these numbers."""
        ended: list[bool] = []
        for number in numbers:
            self.memory.pages[number] = content(KEYS[number])
        self.tiers.save([PagePart(KEYS[n], n) for n in numbers], lambda: ended.append(True))
        self.work()
        assert ended == [True]

    def fetch(self, num_pages: int, first: int = 0) -> int:
        """Fetch pages to blank memory; returns how many arrived."""
        self.memory.pages = [bytes(PAGE_BYTES)] * len(self.memory.pages)
        fetched = fetch_of(num_pages, first)
        self.tiers.start(fetched.fetch)
        self.work()
        assert fetched.num_ended == 1
        for number in range(first, first + fetched.num_arrived):
            assert self.memory.pages[number] == content(KEYS[number])
        return fetched.num_arrived

    def count(self, name: str) -> int:
        return self.tiers.counts[f"kv_{name}_total"]


def test_the_page_used_longest_ago_gives_way() -> None:
    tiers = Tiers(host_pages=3)
    tiers.save(0, 1, 2)
    tiers.tiers.touch((FULL, key) for key in KEYS[:2])  # the first page of a prompt is of most use
    tiers.save(3)
    assert tiers.tiers.num_held(KEYS[:3]) == 2
    tiers.save(4)
    assert tiers.tiers.num_held(KEYS[:2]) == 1
    assert (tiers.fetch(2), tiers.count("host_page_hits"), tiers.count("host_page_evictions")) == (
        1,
        1,
        2,
    )


def test_a_page_that_leaves_host_memory_is_on_disk(tmp_path: Path) -> None:
    tiers = Tiers(host_pages=2, folder=tmp_path)
    tiers.save(*range(6))
    assert tiers.fetch(6) == 6
    assert (tiers.count("host_page_hits"), tiers.count("disk_page_hits")) == (0, 6)
    assert tiers.fetch(2, first=4) == 2
    assert tiers.count("host_page_hits") == 2, "pages from disk are in host memory, too"


def test_a_restart_finds_pages_on_disk_and_refuses_damaged_ones(tmp_path: Path) -> None:
    tiers = Tiers(folder=tmp_path)
    tiers.save(*range(4))
    tiers.tiers.close()
    path = next(tmp_path.rglob(KEYS[2].hex()))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    tiers = Tiers(folder=tmp_path)
    assert tiers.fetch(4) == 2
    assert tiers.count("disk_pages_refused") == 1
    assert tiers.tiers.num_held(KEYS[2:3]) == 0
    tiers.save(2)
    assert tiers.fetch(4) == 4, "computed, it is saved again"


def test_dropped_pages_are_not_found_even_before_they_are_gone(tmp_path: Path) -> None:
    tiers = Tiers(folder=tmp_path)
    tiers.save(0, 1)
    fetched = fetch_of(2)
    tiers.tiers.drop(KEYS[1:2])
    assert tiers.tiers.num_held(KEYS[:2]) == 1
    tiers.tiers.start(fetched.fetch)
    tiers.work()
    assert fetched.num_arrived == 1
    assert not list(tmp_path.rglob(KEYS[1].hex()))
    tiers.save(1)
    assert tiers.fetch(2) == 2


def test_a_full_disk_keeps_host_memory_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = Tiers(folder=tmp_path)

    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tiers.disk, "write", refuse)
    tiers.memory.pages[:2] = [content(KEYS[0]), content(KEYS[1])]
    tiers.tiers.save([PagePart(KEYS[0], 0), PagePart(KEYS[1], 1)], lambda: None)
    for _ in range(2):
        work = tiers.tiers.next_work()
        assert work is not None
        work()
    assert tiers.count("disk_write_errors") == 1
    fetched = fetch_of(2)
    tiers.tiers.start(fetched.fetch)
    work = tiers.tiers.next_work()
    assert work is not None
    work()
    assert fetched.num_arrived == 2


def test_fetches_come_before_copies_and_a_stopped_one_ends(tmp_path: Path) -> None:
    tiers = Tiers(folder=tmp_path)
    tiers.save(0, 1)
    order: list[str] = []
    tiers.tiers.save([PagePart(KEYS[5], 5)], lambda: order.append("saved"))
    fetched, stopped = fetch_of(2), fetch_of(2)
    fetched.fetch.ended = lambda: order.append(f"fetched {fetched.fetch.num_arrived}")
    stopped.fetch.ended = lambda: order.append(f"stopped {stopped.fetch.num_arrived}")
    tiers.tiers.start(fetched.fetch)
    tiers.tiers.start(stopped.fetch)
    tiers.tiers.stop(stopped.fetch)
    tiers.work()
    assert order == ["fetched 2", "stopped 0", "saved"]


def test_the_end_writes_what_is_not_on_disk_and_ends_fetches(tmp_path: Path) -> None:
    tiers = Tiers(folder=tmp_path)
    tiers.memory.pages[0] = content(KEYS[0])
    saved = threading.Event()
    tiers.tiers.save([PagePart(KEYS[0], 0)], saved.set)
    tiers.tiers.begin()
    tiers.tiers.close()
    assert saved.is_set()
    assert Tiers(folder=tmp_path).fetch(1) == 1
