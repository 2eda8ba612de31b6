"""Transfer requests of other engines, each served by a job of this engine.

Owns the parts common to prompts and images: how a transfer request reaches the loop, becomes a job
and is closed; and the counts of both ends of an exchange. Knows no sockets, no tensors.
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
    """The loop's view of `core.kv.transfer.server.PageServer`."""

    counts: Counter[str]

    def start(self, transfers: PageTransferHandler) -> None:
        """Accept transfer requests from now on."""
        ...


class TransferJobs(ABC):
    """Serves transfer requests. Implements `core.kv.transfer.server.PageTransferHandler`.

    All methods run on the loop's thread, except `open` and `close`, which run on the server's.
    """

    def __init__(self, sink: PageSink, model: str, kind: str) -> None:
        self._sink = sink
        self._model = model
        self._kind = kind
        self._submit: Callable[[Job], None] = lambda job: None
        self._post: Post = lambda call: call()
        self._ids = count()

    def connect(self, post: Post) -> None:
        """Register `post`, which schedules a call on the loop's thread."""
        self._post = post

    def attach(self, submit: Callable[[Job], None]) -> None:
        """Accept transfer requests from now on; `submit` runs a job of the engine itself."""
        self._submit = submit
        self._sink.start(self)

    @abstractmethod
    def open(self, transfer: PageTransferRequest) -> None:
        """Check a transfer request, and start its job."""

    def close(self, transfer: PageTransferRequest) -> None:
        """Release a transfer's pages."""
        self._post(partial(self._close, transfer))

    @abstractmethod
    def _close(self, transfer: PageTransferRequest) -> None:
        """Release a transfer's pages, if it was accepted."""

    def _new_id(self) -> str:
        return f"{self._kind}-{self._model}-{next(self._ids)}"

    def _run(self, job_id: str, request: Any, take: Callable[[Output], None]) -> None:
        """Submit a job; `take` receives its outputs."""
        job = Job(
            job_id=job_id,
            model=self._model,
            request=request,
            sink=take,
            arrival_s=time.monotonic(),
        )
        self._submit(job)


def exchange_stats(
    stats: SchedulerStats, counts: Counter[str], link_counts: Counter[str], prefix: str = ""
) -> SchedulerStats:
    """`stats` with `counts`, and the counts of the connections under names with `prefix`.

    Another thread writes `link_counts`; it adds no names.
    """
    counters = {f"{prefix}{name}": float(value) for name, value in link_counts.items()}
    gauges = {f"{prefix}{name}": counters.pop(f"{prefix}{name}") for name in _GAUGES}
    counters.update(counts)
    return replace(
        stats, gauges={**stats.gauges, **gauges}, counters={**stats.counters, **counters}
    )
