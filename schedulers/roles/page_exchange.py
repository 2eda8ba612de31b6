"""Prefill/decode disaggregation: KV pages that one engine computes and another continues from.

Owns both ends on the engine's loop: `FetchedPages` in an engine that decodes, `SentPages` in one
that computes prompts for it. Both use only the prefix index. Arriving pages are published there as
if a row of this engine had computed them; a row waits for an arriving page as it waits for one that
another row computes; missing pages are computed locally. Knows no sockets, no tensors.

All methods run on the loop's thread, except those of `PageTransferHandler`.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from typing import Protocol

from triptych.core.engine_api.frames import FIRST_FRAME_ID
from triptych.core.engine_api.job import Output
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.kv.pages import Lease
from triptych.core.kv.transfer.client import PageFetch
from triptych.core.kv.transfer.server import PageTransferRequest
from triptych.schedulers.base import SchedulerStats
from triptych.schedulers.executors import Post
from triptych.schedulers.roles.transfer_jobs import PageSink, TransferJobs, exchange_stats
from triptych.schedulers.tokens.batch import TokenBatch
from triptych.schedulers.tokens.page_exchange import PageExchange
from triptych.schedulers.tokens.state import SequenceState

_MAX_SHARE = 0.5
"""The share of the pool that pages in transfer may hold: running rows need the rest."""


class ExchangingScheduler(Protocol):
    """The part of `schedulers.tokens.scheduler.TokenScheduler` that an exchange uses."""

    tokens: TokenBatch

    def row_of(self, job_id: str) -> SequenceState | None:
        """The sequence of a job that has not ended."""
        ...

    def cancel(self, job_id: str) -> None:
        """End a job."""
        ...

    def note_change(self) -> None:
        """Make chosen steps outdated: rows or pages have changed."""
        ...


class PageSource(Protocol):
    """The loop's view of `core.kv.transfer.client.PageClient`."""

    counts: Counter[str]

    @property
    def is_connected(self) -> bool:
        """Whether an engine that computes prompts is connected."""
        ...

    def start(self, fetch: PageFetch) -> None:
        """Start fetching pages."""
        ...

    def stop(self, fetch: PageFetch) -> None:
        """End a fetch early; `ended` follows."""
        ...


@dataclass(eq=False, slots=True)
class _OpenFetch:
    """A fetch and the pages that it fills; `num_taken` of them no lease held before."""

    row: SequenceState
    lease: Lease
    keys: list[bytes]
    started_s: float
    num_taken: int
    num_published: int = 0
    is_dropped: bool = False
    fetch: PageFetch | None = None


class FetchedPages(PageExchange):
    """Fetches the pages of prompts from another engine."""

    def __init__(self, scheduler: ExchangingScheduler, source: PageSource) -> None:
        self._counts = Counter(page_fetches_total=0, page_fallbacks_total=0)
        self._wait_s = 0.0
        self._state = scheduler.tokens.state
        self._source = source
        self._note_change = scheduler.note_change
        self._post: Post = lambda call: call()
        self._ids = count()
        self._open: dict[SequenceState, _OpenFetch] = {}

    def connect(self, post: Post) -> None:
        """Register `post`, which schedules a call on the loop's thread."""
        self._post = post

    def on_submit(self, row: SequenceState) -> None:
        """Fetch the full pages of a prompt that are neither cached nor coming."""
        state, pool = self._state, self._state.pool
        keys = row.lookup_keys(pool.page_size)
        num_found = len(pool.peek(keys))
        first = num_found + sum(1 for _ in takewhile(state.is_coming, keys[num_found:]))
        if first == len(keys):
            return
        self._counts["page_fetches_total"] += 1
        lease = pool.acquire()
        pool.extend_cached(lease, keys[:num_found])
        num_held = sum(pool.num_holders(page) > 1 for page in lease.page_ids)
        num_taken = num_found - num_held + len(keys) - first
        num_carried = sum(each.num_taken for each in self._open.values())
        has_room = len(keys) - first <= pool.num_available
        has_room &= num_carried + num_taken <= _MAX_SHARE * pool.num_pages
        if not (has_room and self._source.is_connected):
            pool.release(lease)
            self._counts["page_fallbacks_total"] += 1
            return
        pool.extend(lease, len(keys) - first)
        awaited = _OpenFetch(row, lease, keys[first:], time.monotonic(), num_taken)
        self._open[row] = awaited
        state.in_transfer.add(lease)
        state.arriving.update(awaited.keys)
        awaited.fetch = PageFetch(
            fetch_id=next(self._ids),
            request=_prompt_of(row.request),
            first=first,
            keys=awaited.keys,
            page_ids=lease.page_ids[lease.num_published :],
            arrived=lambda num: self._post(partial(self._take, awaited, num)),
            ended=lambda: self._post(partial(self._end, awaited)),
        )
        self._source.start(awaited.fetch)

    def on_end(self, row: SequenceState) -> None:
        """End the fetch of a row that has ended."""
        awaited = self._open.get(row)
        if awaited is not None and awaited.fetch is not None:
            awaited.is_dropped = True
            self._source.stop(awaited.fetch)

    def add_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """`stats` with the counts of fetched pages."""
        counted = exchange_stats(stats, self._counts, self._source.counts)
        counted.counters["page_wait_seconds_total"] = self._wait_s
        return counted

    def _take(self, awaited: _OpenFetch, num_arrived: int) -> None:
        """Publish the first pages of a fetch, which are written."""
        keys = awaited.keys[awaited.num_published : num_arrived]
        self._state.pool.publish(awaited.lease, keys)
        self._state.arriving.difference_update(keys)
        awaited.num_published = num_arrived
        awaited.row.num_fetched_pages += len(keys)
        self._note_change()

    def _end(self, awaited: _OpenFetch) -> None:
        """Close a fetch that ended: missing pages are computed locally."""
        missing = awaited.keys[awaited.num_published :]
        self._state.arriving.difference_update(missing)
        self._state.in_transfer.remove(awaited.lease)
        self._state.pool.release(awaited.lease)
        del self._open[awaited.row]
        self._wait_s += time.monotonic() - awaited.started_s
        self._counts["page_fallbacks_total"] += bool(missing) and not awaited.is_dropped
        self._note_change()


@dataclass(eq=False, slots=True)
class _SentPrompt:
    """A transfer, the job that computes its prompt, and the pages held for it."""

    transfer: PageTransferRequest
    job_id: str
    lease: Lease
    keys: list[bytes] = field(default_factory=list)
    is_over: bool = False


class SentPages(TransferJobs, PageExchange):
    """Computes prompts for other engines, and sends their pages."""

    def __init__(self, scheduler: ExchangingScheduler, sink: PageSink, model: str) -> None:
        super().__init__(sink, model, "pages")
        self._counts = Counter(page_transfers_total=0)
        self._scheduler = scheduler
        self._tokens = scheduler.tokens
        self._state = scheduler.tokens.state
        self._sent: dict[PageTransferRequest, _SentPrompt] = {}

    def open(self, transfer: PageTransferRequest) -> None:
        """On the server's thread: check a prompt, and start computing it."""
        request, limit = transfer.wanted.request, self._tokens.vocab_size
        if not isinstance(request, TokenRequest):
            transfer.end("no prompt")
            return
        first_free = FIRST_FRAME_ID if request.contents else sys.maxsize
        if all(0 <= token < limit or token >= first_free for token in request.prompt_ids):
            self._post(partial(self._open, transfer, request))
        else:
            transfer.end("a prompt of other tokens than the model's")

    def on_step_end(self) -> None:
        """Send the pages that the step completed."""
        for sent in self._sent.values():
            self._send(sent)

    def add_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """`stats` with the counts of sent pages."""
        return exchange_stats(stats, self._counts, self._sink.counts)

    def _open(self, transfer: PageTransferRequest, request: TokenRequest) -> None:
        self._counts["page_transfers_total"] += 1
        job_id = self._new_id()
        sent = self._sent[transfer] = _SentPrompt(transfer, job_id, self._state.pool.acquire())
        self._state.in_transfer.add(sent.lease)
        self._run(job_id, _prompt_of(request), partial(self._take, sent))
        row = self._scheduler.row_of(job_id)
        if row is None:
            return  # refused: the sink has received the error
        keys = row.lookup_keys(self._state.pool.page_size)
        first = transfer.wanted.first
        sent.keys = keys[first : first + transfer.wanted.num_pages]
        if len(sent.keys) != transfer.wanted.num_pages or first < 0:
            transfer.end("pages that the prompt does not have")
        else:
            self._send(sent)

    def _send(self, sent: _SentPrompt) -> None:
        """Hold the next pages that are computed, and pass them to the transfer."""
        num_before = len(sent.lease)
        self._state.pool.extend_cached(sent.lease, sent.keys[num_before:])
        page_ids = sent.lease.page_ids[num_before:]
        if page_ids:
            sent.transfer.add(list(zip(sent.keys[num_before:], page_ids, strict=False)))

    def _take(self, sent: _SentPrompt, output: Output) -> None:
        """Finish a transfer at the end of its job; the sampled token is dropped."""
        if not output.is_final:
            return
        sent.is_over = True
        self._send(sent)
        if output.error is not None:
            sent.transfer.end(f"{output.error.code}: {output.error.message}")
        elif len(sent.lease) < len(sent.keys):
            sent.transfer.end("pages were evicted")

    def _close(self, transfer: PageTransferRequest) -> None:
        sent = self._sent.pop(transfer, None)
        if sent is None:
            return  # its prompt was not accepted
        self._state.in_transfer.remove(sent.lease)
        self._state.pool.release(sent.lease)
        self._scheduler.note_change()
        if not sent.is_over:
            self._scheduler.cancel(sent.job_id)


def _prompt_of(request: TokenRequest) -> TokenRequest:
    """The request that computes only the pages of a prompt, without its answer."""
    returns_state = request.sampling.returns_state
    return TokenRequest(
        prompt_ids=request.prompt_ids,
        prompt_frames=request.prompt_frames,
        contents=request.contents,
        priority=request.priority,
        tenant=request.tenant,
        adapter=request.adapter,
        sampling=SamplingParams(temperature=0.0, max_tokens=1, returns_state=returns_state),
    )
