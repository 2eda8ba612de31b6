"""Prefill/decode disaggregation: KV pages that one engine computes and another continues from.

Owns both ends on the engine's loop: `FetchedPages` in an engine that decodes, `SentPages` in one
that computes prompts for it. Both use only the prefix index (`schedulers.tokens.page_fetches`).
Knows no sockets, no tensors.

All methods run on the loop's thread, except those of `PageTransferHandler`.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from triptych.core.engine_api.frames import FIRST_FRAME_ID
from triptych.core.engine_api.job import Output
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.kv.pages import HeldPart
from triptych.core.kv.parts import PartKind
from triptych.core.kv.transfer.server import PageTransferRequest
from triptych.schedulers.base import SchedulerStats
from triptych.schedulers.roles.transfer_jobs import PageSink, TransferJobs, exchange_stats
from triptych.schedulers.tokens.page_exchange import PageExchange
from triptych.schedulers.tokens.page_fetches import (
    ExchangingScheduler,
    OpenFetch,
    PageFetches,
    PageSource,
)
from triptych.schedulers.tokens.state import SequenceState


class RemotePages(PageSource, Protocol):
    """The loop's view of `core.kv.transfer.client.PageClient`."""

    counts: Counter[str]

    @property
    def is_connected(self) -> bool:
        """Whether an engine that computes prompts is connected."""
        ...


class FetchedPages(PageFetches):
    """Fetches the pages of prompts from another engine."""

    def __init__(self, scheduler: ExchangingScheduler, source: RemotePages) -> None:
        super().__init__(scheduler, source)
        self._counts = Counter(page_fetches_total=0, page_fallbacks_total=0)
        self._wait_s = 0.0
        self._source = source

    def on_submit(self, row: SequenceState) -> None:
        """Fetch the full pages of a prompt that are neither cached nor coming."""
        missing = self._missing(row)
        if not missing.keys:
            return
        self._counts["page_fetches_total"] += 1
        prompt = _prompt_of(row.request)
        if not (self._source.is_connected and self._start(row, missing, prompt)):
            self._counts["page_fallbacks_total"] += 1

    def add_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """`stats` with the counts of fetched pages."""
        counted = exchange_stats(stats, self._counts, self._source.counts)
        counted.counters["page_wait_seconds_total"] = self._wait_s
        return counted

    def _take(self, awaited: OpenFetch, num_arrived: int) -> None:
        num_before = awaited.num_published
        super()._take(awaited, num_arrived)
        awaited.row.num_fetched_pages += awaited.num_published - num_before

    def _end(self, awaited: OpenFetch) -> None:
        is_short = awaited.num_published < len(awaited.keys)
        self._wait_s += time.monotonic() - awaited.started_s
        self._counts["page_fallbacks_total"] += is_short and not awaited.is_dropped
        super()._end(awaited)


@dataclass(eq=False, slots=True)
class _SentPrompt:
    """A transfer, the job that computes its prompt, and the parts of pages to be sent.

    The first `num_full` are of layers that see all tokens. `held` are those that are there; the
    first `num_added` parts were passed to the transfer.
    """

    transfer: PageTransferRequest
    job_id: str
    parts: list[tuple[PartKind, bytes]] = field(default_factory=list)
    num_full: int = 0
    held: dict[int, HeldPart] = field(default_factory=dict)
    num_added: int = 0
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
        sent = self._sent[transfer] = _SentPrompt(transfer, job_id)
        self._run(job_id, _prompt_of(request), partial(self._take, sent))
        row = self._scheduler.row_of(job_id)
        if row is None:
            return  # refused: the sink has received the error
        keys, wanted = row.lookup_keys(self._state.pool.page_size), transfer.wanted
        if 0 <= wanted.first <= (num_pages := wanted.first + wanted.num_pages) <= len(keys):
            needed = self._state.pool.rule.needed(num_pages, wanted.first)
            sent.parts = [(kind, keys[page]) for kind, page in needed]
            sent.num_full = sum(kind is PartKind.FULL for kind, _ in needed)
        if wanted.num_pages < 1 or len(sent.parts) != wanted.num_parts:
            transfer.end("pages that the prompt does not have")
        else:
            self._send(sent)

    def _send(self, sent: _SentPrompt) -> None:
        """Hold the parts that are there, and pass the next ones in order to the transfer.

        Full parts come in order; others may be there before them, and be gone after them.
        """
        first = sent.num_added
        for number in range(max(first, sent.num_full), len(sent.parts)):
            self._hold(sent, number)
        while sent.num_added < len(sent.parts) and self._hold(sent, sent.num_added):
            sent.num_added += 1
        if sent.num_added > first:
            sent.transfer.add([sent.held[number].part for number in range(first, sent.num_added)])

    def _hold(self, sent: _SentPrompt, number: int) -> bool:
        """Hold a part until the end of its transfer; false if it is not there."""
        if number not in sent.held:
            held = self._state.pool.hold(*sent.parts[number])
            if held is None:
                return False
            sent.held[number] = held
        return True

    def _take(self, sent: _SentPrompt, output: Output) -> None:
        """Finish a transfer at the end of its job; the sampled token is dropped."""
        if not output.is_final:
            return
        sent.is_over = True
        self._send(sent)
        if output.error is not None:
            sent.transfer.end(f"{output.error.code}: {output.error.message}")
        elif sent.num_added < len(sent.parts):
            sent.transfer.end("pages were evicted")

    def _close(self, transfer: PageTransferRequest) -> None:
        sent = self._sent.pop(transfer, None)
        if sent is None:
            return  # its prompt was not accepted
        for held in sent.held.values():
            self._state.pool.let_go(held)
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
        adapter_place=request.adapter_place,
        sampling=SamplingParams(temperature=0.0, max_tokens=1, returns_state=returns_state),
    )
