"""A vision scheduler whose images are encoded elsewhere, as far as a test lets them come."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

from support.vision_world import VisionDriver, VisionWorld
from triptych.core.engine_api.prompt_content import PromptContent
from triptych.core.kv.transfer.client import PageFetch
from triptych.core.kv.transfer.memory import new_counts
from triptych.modalities.vlm.scheduling.fetching import FetchedFeatures

_PAGE_FEATURES = 2


class HandImages:
    """Implements `ArrivingMemory` and `PageSource` for a world."""

    def __init__(self, world: VisionWorld, capacity_bytes: int = 1000) -> None:
        self.counts: Counter[str] = new_counts(_PAGE_FEATURES)
        self.is_connected = True
        self.has_room = True
        self.fault: Exception | None = None
        self.capacity_bytes = capacity_bytes
        self.open: list[PageFetch] = []
        self.expected: set[int] = set()
        self._features = world.features
        self._ids = itertools.count()
        self.fetched = FetchedFeatures(self, self)
        world.scheduler.image_exchange = self.fetched
        world.scheduler.connect(lambda call: call())

    # As the memory.

    def num_bytes_of(self, num_features: int) -> int:
        return num_features

    def num_pages_of(self, num_features: int) -> int:
        return -(-num_features // _PAGE_FEATURES)

    def expect(self, num_features: int) -> Sequence[int]:
        page_ids = [next(self._ids) for _ in range(self.num_pages_of(num_features))]
        self.expected.update(page_ids)
        return page_ids

    def keep(self, digest: bytes, page_ids: Sequence[int]) -> bool:
        assert self.expected.issuperset(page_ids)
        if self.fault is not None:
            raise self.fault
        if self.has_room:
            assert self._features.acquire(digest) is None, "it was known"
            self._features.insert(digest, "features", 10)
        return self.has_room

    def drop(self, page_ids: Sequence[int]) -> None:
        self.expected -= set(page_ids)

    # As the source.

    def start(self, fetch: PageFetch) -> None:
        self.open.append(fetch)

    def stop(self, fetch: PageFetch) -> None:
        self.lose(fetch)

    # As a test moves it.

    @property
    def digests(self) -> list[bytes]:
        """Of the images on their way."""
        found = []
        for fetch in self.open:
            assert isinstance(fetch.request, PromptContent)
            found.append(fetch.request.span.digest)
        assert len(set(found)) == len(found), "an image is fetched twice at once"
        return found

    def deliver(self, fetch: PageFetch) -> None:
        fetch.num_arrived = len(fetch.parts)
        self.lose(fetch)

    def lose(self, fetch: PageFetch) -> None:
        """Nothing more of it comes."""
        self.open.remove(fetch)
        fetch.ended()

    def deliver_all(self) -> None:
        while self.open:
            self.deliver(self.open[0])


class FetchingDriver(VisionDriver):
    """Does what happens to images on their way, too."""

    def __init__(self, world: VisionWorld, rng: random.Random, link: HandImages) -> None:
        super().__init__(world, rng)
        self.link = link

    def act(self) -> None:
        draw, link = self.rng.random(), self.link
        if draw < 0.02:
            link.is_connected = not link.is_connected
        elif draw < 0.04:
            link.has_room = not link.has_room
        elif draw < 0.2 and link.open:
            fetch = self.rng.choice(link.open)
            (link.lose if self.rng.random() < 0.3 else link.deliver)(fetch)
        else:
            super().act()
        assert link.digests is not None
        self.world.check()

    def finish(self) -> None:
        self.link.is_connected = False
        for fetch in tuple(self.link.open):
            self.link.lose(fetch)
        super().finish()
        assert not self.link.open
        assert not self.link.expected
