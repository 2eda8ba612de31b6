"""Images that another engine encodes for this one.

Owns the fetches of features, on the engine's loop. Arriving features are added to the cache as if
they had been encoded here; features that do not arrive are computed here. Knows no sockets, no
tensors, no prompts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

from triptych.core.engine_api.prompt_content import PromptContent
from triptych.core.kv.transfer.client import PageFetch
from triptych.modalities.vlm.scheduling.features import (
    FEATURE_PREFIX,
    ReceivingMemory,
    feature_parts,
)
from triptych.schedulers.base import SchedulerStats
from triptych.schedulers.executors import Post
from triptych.schedulers.roles.page_exchange import RemotePages
from triptych.schedulers.roles.transfer_jobs import exchange_stats


class ImageExchange:
    """Hooks that the scheduler calls for images. This base class does nothing."""

    def connect(self, post: Post, done: Callable[[bytes, bool], None]) -> None:
        """Register `post`, which schedules a call on the loop's thread, and `done`.

        `done` receives a digest, and whether its features are in the cache, with a reference.
        """

    def is_coming(self, digest: bytes) -> bool:
        """Whether an image's features are being fetched."""
        return False

    def start(self, image: PromptContent) -> None:
        """Fetch an image's features from another engine, if possible."""

    def stop(self, digest: bytes) -> None:
        """End the fetch of an image that is not needed any more, if there is one."""

    def add_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """`stats` with the counts of fetched features."""
        return stats


@dataclass(frozen=True, slots=True)
class _AwaitedImage:
    """A fetch of `num_bytes` that began at `started_s`."""

    fetch: PageFetch
    started_s: float
    num_bytes: int


class FetchedFeatures(ImageExchange):
    """Fetches image features from engines of the encoder role."""

    def __init__(self, memory: ReceivingMemory, source: RemotePages) -> None:
        self._memory = memory
        self._source = source
        self._counts = Counter(feature_fetches_total=0, feature_fallbacks_total=0)
        self._wait_s = 0.0
        self._post: Post = lambda call: call()
        self._done: Callable[[bytes, bool], None] = lambda digest, is_here: None
        self._ids = count()
        self._open: dict[bytes, _AwaitedImage] = {}
        self._stopped: set[bytes] = set()

    def connect(self, post: Post, done: Callable[[bytes, bool], None]) -> None:
        """Register `post`, which schedules a call on the loop's thread, and `done`."""
        self._post, self._done = post, done

    def is_coming(self, digest: bytes) -> bool:
        """Whether an image's features are being fetched."""
        return digest in self._open

    def start(self, image: PromptContent) -> None:
        """Fetch an image's features, if an engine is connected and memory is free."""
        span, memory = image.span, self._memory
        self._counts["feature_fetches_total"] += 1
        num_bytes = memory.num_bytes_of(span.num_features)
        num_coming = sum(awaited.num_bytes for awaited in self._open.values())
        has_room = num_coming + num_bytes <= memory.capacity_bytes
        if not (has_room and self._source.is_connected):
            self._counts["feature_fallbacks_total"] += 1
            return
        page_ids = memory.expect(span.num_features)
        fetch = PageFetch(
            fetch_id=next(self._ids),
            request=image,
            first=0,
            num_pages=len(page_ids),
            parts=feature_parts(span, page_ids),
            arrived=lambda num_arrived: None,
            ended=partial(self._end, span.digest),
        )
        self._open[span.digest] = _AwaitedImage(fetch, time.monotonic(), num_bytes)
        self._source.start(fetch)

    def stop(self, digest: bytes) -> None:
        """End an image's fetch, if there is one."""
        awaited = self._open.get(digest)
        if awaited is not None:
            self._stopped.add(digest)
            self._source.stop(awaited.fetch)

    def add_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """`stats` with the counts of fetched features."""
        found = exchange_stats(stats, self._counts, self._source.counts, FEATURE_PREFIX)
        found.counters["feature_wait_seconds_total"] = self._wait_s
        return found

    def _end(self, digest: bytes) -> None:
        """On the source's thread: cache complete features, and notify the loop."""
        fetch, is_here = self._open[digest].fetch, False
        page_ids = [part.number for part in fetch.parts]
        try:
            if fetch.num_arrived == len(page_ids):
                is_here = self._memory.keep(digest, page_ids)
        finally:  # on any failure, prompts that wait for the image must be notified
            self._memory.drop(page_ids)
            self._post(partial(self._close, digest, is_here))

    def _close(self, digest: bytes, is_here: bool) -> None:
        awaited = self._open.pop(digest)
        self._wait_s += time.monotonic() - awaited.started_s
        is_missed = not is_here and digest not in self._stopped
        self._stopped.discard(digest)
        self._counts["feature_fallbacks_total"] += is_missed
        self._done(digest, is_here)
