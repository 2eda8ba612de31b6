"""Transfer requests of other engines that jobs of this one work off.

Owns what prompts and images have in common: how a transfer reaches the loop, becomes a job, and is
let go; and what both ends of an exchange count. Knows no sockets, no tensors.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Protocol

from triptych.core.engine_api.job import Job, Output
from triptych.core.kv.transfer.server import PageTransferHandler, PageTransferRequest
from triptych.schedulers.base import SchedulerStats
from triptych.schedulers.executors import Post

_GAUGES = ("page_links", "page_bytes")


class PageSink(Protocol):
    """What `core.kv.transfer.server.PageServer` is to the loop."""

    counts: Counter[str]

    def start(self, transfers: PageTransferHandler) -> None:
        """Take transfers from now on."""
        ...


class TransferJobs(ABC):
    """Serves transfer requests. Implements `core.kv.transfer.server.PageTransferHandler`.

    All methods are called on the loop's thread, but for `open` and `close`: on the server's.
    """

    def __init__(self, sink: PageSink, model: str, kind: str) -> None:
        self._sink = sink
        self._model = model
        self._kind = kind
        self._submit: Callable[[Job], None] = lambda job: None
        self._post: Post = lambda call: call()
        self._ids = count()

    def connect(self, post: Post) -> None:
        """Learn how the server's thread reaches the loop's."""
        self._post = post

    def attach(self, submit: Callable[[Job], None]) -> None:
        """Take transfers from now on; `submit` runs a job of the engine's own."""
        self._submit = submit
        self._sink.start(self)

    @abstractmethod
    def open(self, transfer: PageTransferRequest) -> None:
        """Check a transfer, and have it worked off."""

    def close(self, transfer: PageTransferRequest) -> None:
        """Let go of a transfer's pages."""
        self._post(partial(self._close, transfer))

    @abstractmethod
    def _close(self, transfer: PageTransferRequest) -> None:
        """Let go of a transfer's pages, if it was taken."""

    def _new_id(self) -> str:
        return f"{self._kind}-{self._model}-{next(self._ids)}"

    def _run(self, job_id: str, request: Any, take: Callable[[Output], None]) -> None:
        """Submit a job, whose outputs `take` gets."""
        job = Job(
            job_id=job_id,
            model=self._model,
            request=request,
            sink=take,
            arrival_s=time.monotonic(),
        )
        self._submit(job)


def exchange_stats(
    stats: SchedulerStats, ours: Counter[str], theirs: Counter[str], prefix: str = ""
) -> SchedulerStats:
    """`stats` with our counts, and those of the connections under names that begin with `prefix`.

    `theirs` is written by another thread, which adds no names.
    """
    counters = {f"{prefix}{name}": float(value) for name, value in theirs.items()}
    gauges = {f"{prefix}{name}": counters.pop(f"{prefix}{name}") for name in _GAUGES}
    counters.update(ours)
    return replace(
        stats, gauges={**stats.gauges, **gauges}, counters={**stats.counters, **counters}
    )
