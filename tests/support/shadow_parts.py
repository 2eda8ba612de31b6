"""The parts of a shadow model's pages as bytes, and random models with parts of several kinds."""

from __future__ import annotations

import random
from typing import Any

from support.shadow_states import State
from support.shadow_windows import Cell
from support.token_driver import random_world
from support.token_world import Page, World
from triptych.core.kv.parts import PartKind

DIGEST_BYTES = 12


class ShadowMemory:
    """The parts of one kind. Implements `PageMemory`."""

    def __init__(self, world: World, kind: PartKind) -> None:
        self._world, self._kind = world, kind
        num_digests = 1 if kind is PartKind.STATE else world.pool.page_size
        self.page_bytes = DIGEST_BYTES * num_digests

    def num_bytes(self, page_id: int) -> int:
        return self.page_bytes

    def read(self, page_id: int, buffer: memoryview) -> None:
        held = [part for part, _ in self._world.pool._held]
        assert (page_id, self._kind) in [(part.number, part.kind) for part in held], "not held"
        runner = self._world.runner
        if self._kind is PartKind.FULL:
            digests = runner.pages[page_id].digests
        elif self._kind is PartKind.STATE:
            digests = [runner.states.snapshots[page_id].digest]
        else:
            assert runner.windows is not None
            digests = [cell.digest for cell in runner.windows.cells[page_id]]
        buffer[:] = b"".join(digests)

    def write(self, page_id: int, buffer: memoryview) -> None:
        """Write a part that no row uses, and that no step in flight does."""
        parts = range(0, len(buffer), DIGEST_BYTES)
        digests = [bytes(buffer[first : first + DIGEST_BYTES]) for first in parts]
        pool, runner = self._world.pool, self._world.runner
        if self._kind is PartKind.FULL:
            assert pool.num_holders(page_id) == 1, "no row uses a page that is written"
            runner.pages[page_id] = Page(digests, [-1] * len(digests))
        elif self._kind is PartKind.STATE:
            assert pool.snapshots is not None
            assert page_id in pool.snapshots._pending, "a state is written that may be found"
            reading = [row.restored for row in self._world.scheduler._rows_in_flight()]
            assert page_id not in reading, "a state is written that a step reads"
            runner.states.snapshots[page_id] = State(digests[0])
        else:
            assert pool.windows is not None
            assert runner.windows is not None
            page = pool.windows._parts.index(page_id)
            assert pool.windows._num_holders[page] == 1, "no row uses a part that is written"
            runner.windows.cells[page_id] = [Cell(digest) for digest in digests]


def shadow_memories(world: World) -> dict[PartKind, ShadowMemory]:
    """The memory of each kind of parts in a world."""
    kinds = [PartKind.FULL]
    if world.pool.windows is not None:
        kinds.append(PartKind.WINDOW)
    if world.pool.snapshots is not None:
        kinds.append(PartKind.STATE)
    return {kind: ShadowMemory(world, kind) for kind in kinds}


def random_model(rng: random.Random) -> dict[str, Any]:
    """The kinds of a model's layers, and its page size."""
    return {
        "page_size": rng.choice((2, 4)),
        "window": rng.choice((0, 0, 2, 5, 9)),
        "has_states": rng.random() < 0.4,
    }


def world_of(rng: random.Random, model: dict[str, Any]) -> World:
    """A small server for such a model."""
    return random_world(
        rng,
        page_size=model["page_size"],
        window=model["window"],
        num_window_rows=rng.choice((1, 2, 6)),
        num_spare_windows=rng.choice((0, 3, 30)),
        num_snapshots=rng.choice((1, 3, 20)) if model["has_states"] else None,
    )
