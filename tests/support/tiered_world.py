"""A token scheduler over tiers of host memory and disk, whose thread a test plays."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from support.page_peers import FORMAT
from support.token_driver import Driver, random_world
from support.token_world import Page, World
from triptych.core.kv.tiers.disk import DiskTier
from triptych.core.kv.tiers.host import HostTier
from triptych.core.kv.tiers.store import PageTiers
from triptych.schedulers.tokens.stored_pages import StoredPages

_DIGEST_BYTES = 12


class ShadowMemory:
    """The pages of a shadow model as bytes. Implements `PageMemory`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.page_bytes = _DIGEST_BYTES * world.pool.page_size

    def num_bytes(self, page_id: int) -> int:
        return self.page_bytes

    def read(self, page_id: int, buffer: memoryview) -> None:
        assert self._world.pool.num_holders(page_id), "a page that is saved is held"
        buffer[:] = b"".join(self._world.runner.pages[page_id].digests)

    def write(self, page_id: int, buffer: memoryview) -> None:
        assert self._world.pool.num_holders(page_id) == 1, "no row uses a page that is written"
        parts = range(0, len(buffer), _DIGEST_BYTES)
        digests = [bytes(buffer[first : first + _DIGEST_BYTES]) for first in parts]
        self._world.runner.pages[page_id] = Page(digests, [-1] * len(digests))


class TieredWorld:
    """A world, and the tiers below its device; with a folder these include a disk."""

    def __init__(
        self, world: World, *, host_pages: int, folder: Path | None = None, disk_pages: int = 0
    ) -> None:
        self.world = world
        memory = ShadowMemory(world)
        page_bytes = memory.page_bytes
        disk = None
        if folder is not None:
            page_format = msgspec.structs.replace(FORMAT, page_bytes=page_bytes)
            disk = DiskTier(folder, page_format, 0)
            disk.num_pages = disk_pages
        self.tiers = PageTiers(memory, HostTier(host_pages * page_bytes, page_bytes), disk)
        self.exchange = StoredPages(world.scheduler, self.tiers)
        world.scheduler.exchange = self.exchange

    def work(self, most: int = 1_000_000) -> None:
        """Let the tiers' thread do some of its work."""
        while most and self.tiers.has_work:
            work = self.tiers.next_work()
            assert work is not None
            work()
            most -= 1

    def run(self, request: object, name: str) -> None:
        """A job from its arrival to its end, the tiers always up to date."""
        self.world.submit(name, request)
        self.finish()

    def finish(self) -> None:
        """Run to the end, then expect every answer right and everything given back."""
        for _ in range(10_000):
            self.work()
            if not self.world.step() and not self.tiers.has_work:
                break
        self.world.finish_all()
        state = self.world.scheduler.tokens.state
        assert not state.in_transfer
        assert not state.arriving

    def counter(self, name: str) -> float:
        return self.world.scheduler.stats().counters[name]


def drive_tiers(seed: int, num_actions: int, folder: Path) -> list[TieredWorld]:
    """A server's life at random, with restarts; what its disk has, the next one finds."""
    rng = random.Random(seed)
    page_size = rng.choice((2, 4))
    has_disk, lives = rng.random() < 0.7, []
    for _ in range(2):
        world = random_world(rng)
        while world.pool.page_size != page_size:
            world = random_world(rng)
        tiered = TieredWorld(
            world,
            host_pages=rng.choice((1, 3, 20, 60)),
            folder=folder if has_disk else None,
            disk_pages=rng.choice((0, 4, 40, 200)),
        )
        lives.append(tiered)
        driver = Driver(world, rng)
        for _ in range(num_actions):
            driver.act()
            tiered.work(rng.choice((0, 0, 1, 1, 4)))
        for job_id in world.jobs:
            world.scheduler.set_paused(job_id, is_paused=False)
        tiered.finish()
        tiered.tiers.close()
    return lives
