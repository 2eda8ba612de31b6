"""A token scheduler over tiers of host memory and disk, whose thread a test plays."""

from __future__ import annotations

import random
from pathlib import Path

from support.page_peers import FORMAT
from support.shadow_parts import random_model, shadow_memories, world_of
from support.token_driver import Driver
from support.token_world import World
from triptych.core.kv.tiers.disk import DiskTier
from triptych.core.kv.tiers.host import HostTier
from triptych.core.kv.tiers.store import PageTiers, Shelf
from triptych.schedulers.tokens.stored_pages import StoredPages


class TieredWorld:
    """A world, and the tiers below its device; with a folder these include a disk."""

    def __init__(
        self, world: World, *, host_pages: int, folder: Path | None = None, disk_pages: int = 0
    ) -> None:
        self.world = world
        shelves = {}
        for kind, memory in shadow_memories(world).items():
            page_bytes, disk = memory.page_bytes, None
            if folder is not None:
                disk = DiskTier(folder, FORMAT.of_kind(kind, page_bytes), 0)
                disk.num_pages = disk_pages
            shelves[kind] = Shelf(memory, HostTier(host_pages * page_bytes, page_bytes), disk)
        self.tiers = PageTiers(shelves)
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
    model, has_disk, lives = random_model(rng), rng.random() < 0.7, []
    for _ in range(2):
        world = world_of(rng, model)
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
