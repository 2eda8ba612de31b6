"""Sequences of tokens in shared steps and pages, for text and speech.

Owns the life of a sequence from the first page to the last token. `policy` chooses which sequences
run next; this module books the chosen step and records its results. Knows no jobs and no tensors.

Plans may overlap: the next one is booked while one or more are in flight. At that time the counts
of rows in flight are known, the values of their tokens are not. A row that turns out to have ended
leaves with the last step that still computes it: those results are dropped, and only then are its
pages and slot free, since until then the device may write to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile
from typing import Any

from triptych.core.engine_api.job import Job
from triptych.core.engine_api.plan import TokenPlan
from triptych.core.engine_api.tokens import FinishReason, TokenDelta, TokenRequest
from triptych.core.errors import NonFinite
from triptych.core.grammar.matcher import TokenMask
from triptych.core.kv.keys import root_key
from triptych.core.kv.pages import PagePool
from triptych.core.options.config import ScheduleOptions
from triptych.schedulers.base import SchedulerStats
from triptych.schedulers.tokens.adapters import AdapterPool
from triptych.schedulers.tokens.budget import StepBudget
from triptych.schedulers.tokens.draft_model import DraftPiece
from triptych.schedulers.tokens.draft_search import Drafting, Verified
from triptych.schedulers.tokens.grammar_worker import GrammarState, MaskRequest
from triptych.schedulers.tokens.policy import choose_step
from triptych.schedulers.tokens.reasoning import ReasoningCounter
from triptych.schedulers.tokens.request_sizes import RequestSizes
from triptych.schedulers.tokens.scheduled_row import ScheduledRow
from triptych.schedulers.tokens.state import SequenceState, TokenProgress, TokenState
from triptych.schedulers.tokens.state_saves import (
    book_saves,
    book_spares,
    plan_saves,
    publish_saves,
    settle_saves,
)
from triptych.schedulers.tokens.step import TokenLimits, TokenStep

COUNTERS = (
    "prompt_tokens_total",
    "cached_tokens_total",
    "output_tokens_total",
    "preemptions_total",
    "non_finite_total",
    "draft_tokens_total",
    "accepted_draft_tokens_total",
)


class TokenBatch:
    """Sequences of one model that share steps and pages.

    Has no jobs: the owner of a sequence opens and adds it, sends the deltas that `accept` returns,
    and closes it. `counters` are the owner's totals. `max_length` bounds prompt plus output.
    """

    def __init__(
        self,
        *,
        pool: PagePool,
        options: ScheduleOptions,
        max_length: int,
        namespace: bytes,
        counters: dict[str, float],
    ) -> None:
        self.pool = pool
        self.options = options
        self.state = TokenState(pool=pool, options=options)
        self.mask_requests: list[MaskRequest] = []
        """Requests that the grammar worker has not taken yet."""
        self.grammar_starts: list[SequenceState] = []
        """Rows whose grammars start because their reasoning has ended."""
        self.drafting = Drafting(self.state.running)
        """The drafts of rows."""
        self.relaxes_reasoning = False
        """Whether drafts of reasoning count by a relaxed rule."""
        self.adapters: AdapterPool | None = None
        """The adapters of rows; set before the first sequence, if there may be any."""
        self.vocab_size = 0
        """The length of masks in tokens; set before the first sequence of a model with masks."""
        self.sizes = RequestSizes(pool, options, max_length)
        """The bounds of prompts and answers."""
        self._namespace = namespace
        self._counters = counters
        self._num_opened = 0

    def open(
        self, name: str, job: Job, request: TokenRequest, *, arrival_s: float
    ) -> SequenceState:
        """A new sequence with its rank. Raises InvalidRequest or ContextLengthExceeded."""
        max_outputs = self.sizes.max_outputs(request)
        reasoning = None
        if request.reasoning is not None:
            reasoning = ReasoningCounter(request.reasoning, request, self.vocab_size)
            reasoning.is_relaxed = self.relaxes_reasoning
        has_grammar = request.grammar and not (reasoning and reasoning.delays_grammar)
        is_ranked = self.options.schedule_policy == "priority"
        self._num_opened += 1
        return SequenceState(
            name=name,
            job=job,
            request=request,
            rank=(-request.priority if is_ranked else 0, self._num_opened),
            arrival_s=arrival_s,
            max_outputs=max_outputs,
            root=root_key(self._namespace, adapter=request.adapter, tenant=request.tenant),
            is_paused=job.is_paused,
            grammar=GrammarState(request) if has_grammar else None,
            reasoning=reasoning,
            lookup=self.drafting.lookup(request),
            drafted=self.drafting.drafted(request),
        )

    def prompt_keys(self, row: SequenceState) -> list[bytes]:
        """The keys of the full pages of a prompt; none where pages are not shared."""
        page_size = self.pool.page_size
        if self.pool.enable_prefix_caching:
            row.extend_keys(row.num_prompt_tokens // page_size, page_size)
        return row.keys

    def add(self, row: SequenceState) -> None:
        """Queue a sequence."""
        self.prompt_keys(row)
        if self.adapters is not None and row.request.adapter:
            self.adapters.join(row)
        self.state.rows.add(row)
        self.state.shares.join(row.client)
        self.state.enqueue(row)

    def close(self, row: SequenceState) -> None:
        """End a sequence; its resources are freed once no step in flight uses them."""
        row.is_over = True
        self.state.shares.leave(row.client)
        self.state.leave(row)
        self._release(row)

    def settle(self, piece: ScheduledRow) -> None:
        """Free what a sequence's part of a step that is over held alone."""
        settle_saves(self.pool, piece)
        self._release(piece.unit)

    def _release(self, row: SequenceState) -> None:
        """Free the resources of an ended or spoiled sequence, if no step in flight uses them."""
        if row.num_in_flight:
            return
        if row.is_over and self.adapters is not None and row.request.adapter:
            self.adapters.leave(row)
        if row in self.state.leaving:
            self.state.leaving.remove(row)
            self._give_back(row)
        elif row.is_spoiled:
            self._preempt(row)

    def num_covered(self, row: SequenceState) -> int:
        """The number of leading positions that are computed, in flight, cached or arriving."""
        if row.lease is not None:
            return row.num_booked
        page_size = self.pool.page_size
        keys = row.lookup_keys(page_size)
        num_found = len(self.pool.peek(keys))
        num_arriving = sum(1 for _ in takewhile(self.state.arriving.__contains__, keys[num_found:]))
        return (num_found + num_arriving) * page_size

    def progress(self, row: SequenceState) -> TokenProgress:
        """The progress of a sequence."""
        return TokenProgress(
            num_left=row.num_tokens - self.num_covered(row),
            num_outputs=len(row.output_ids) + row.num_unknown,
            can_step=row.can_step,
            is_waiting=row.lease is None,
            is_answered=row.is_decoding,
        )

    def choose_step(self, limits: TokenLimits) -> TokenStep | None:
        """The policy's choice with its work; the owner sets its due time."""
        step = choose_step(self.state, limits)
        if not step.rows:
            return None
        num_decode_rows = num_tokens = context_tokens = 0
        for piece in step.rows:
            if piece.is_decode:
                num_decode_rows += 1
            num_tokens += piece.num_tokens
            context_tokens += piece.start
        context_tokens += num_tokens
        if num_decode_rows:
            step.kind = "decode" if num_decode_rows == len(step.rows) else "mixed"
        step.work = {
            "decode_rows": num_decode_rows,
            "prompt_tokens": num_tokens - num_decode_rows,
            "context_tokens": context_tokens,
        }
        return step

    def take(self, step: TokenStep, model: str, step_id: int) -> TokenPlan:
        """Release and take pages and slots as chosen, and make the plan.

        Cached pages are acquired before new ones are taken, which could otherwise evict them.
        """
        if step.is_retry:
            self.state.retries.groups.popleft()
        for victim in step.victims:
            self._preempt(victim)
        for row, num_pages in step.awaited:
            row.awaited_key = row.keys[num_pages - 1]
        for row in step.overtaken:
            row.num_times_overtaken += 1
        for admission in step.admissions:
            keys = admission.row.keys[: admission.num_cached]
            admission.row.lease = self.pool.acquire(keys)
            assert len(admission.row.lease) == admission.num_cached, "found pages are still cached"
        page_size = self.pool.page_size
        for piece in step.rows:
            lease, end = piece.unit.lease, piece.start + piece.num_tokens
            if end > len(lease.page_ids) * page_size and piece.unit.is_answering:
                self.pool.extend(lease, self.pool.num_pages_for(end) - len(lease))
        for admission in step.admissions:
            plan_saves(self.pool, admission.row)
            self.state.admit(admission.row, admission.num_pages)
            if not admission.row.has_started:
                self._count_start(admission.row)
        self._book_saves(step)
        self.state.charge(step.rows)
        return TokenPlan(
            step_id=step_id,
            model=model,
            kind=step.kind,
            rows=tuple([piece.book(self.pool) for piece in step.rows]),
        )

    def _book_saves(self, step: TokenStep) -> None:
        """Choose the snapshots that a step saves, those that rows wait for among them."""
        if self.pool.snapshots is None:
            return
        for row, num_pages in step.awaited:
            owner = self.state.computing.get(row.keys[num_pages - 1])
            if owner is not None:
                owner.saved_pages.add(num_pages)
        for piece in step.rows:
            book_saves(self.pool, piece, len(self.state.running))
        for piece in step.rows:
            book_spares(self.pool, piece)

    def accept(
        self, piece: ScheduledRow, result: TokenDelta, now_s: float
    ) -> TokenDelta | NonFinite | None:
        """Record the `result` of a sequence in a step, and publish its full pages.

        Returns the delta or error that the owner should send. After an error, or a delta with a
        `finish_reason`, the owner closes the sequence.
        """
        row = piece.unit
        num_accepted = piece.num_accepted(result.token_ids)
        row.num_committed = piece.known_end + self._num_kept(piece, num_accepted)
        row.num_unknown -= piece.is_sampled
        lease = row.lease
        assert lease is not None, "a running row holds a lease"
        if not result.is_finite:
            self.pool.unpublish(lease, row.keys)
            self._counters["non_finite_total"] += 1
            return NonFinite("The model computed no finite values for this request.")
        if not row.has_answered:
            row.prompt_logprobs += result.prompt_logprobs
        delta = None
        if piece.is_sampled:
            row.last_token_s = now_s
            delta = self._answer(piece, result, num_accepted)
        if row.num_committed >= (lease.num_published + 1) * self.pool.page_size:
            self.state.publish(row)
        if self.pool.windows is not None:
            self.pool.leave_windows(lease, row.num_committed)
        publish_saves(self.pool, piece)
        if self.state.retries.restarts:
            self.state.retries.settle(row)
        return delta

    def _answer(self, piece: ScheduledRow, result: TokenDelta, num_accepted: int) -> TokenDelta:
        """Extend the answer by the tokens of a step, up to the first that ends it."""
        row, sampling = piece.unit, piece.unit.request.sampling
        if sampling.returns_state:
            return self.delta(row, result, finish_reason="stop")
        if piece.drafts:
            row.num_booked = piece.known_end + self._num_kept(piece, num_accepted)
            row.is_verifying = row.is_decoding = False
            row.num_forced = piece.known_end + num_accepted + 1 - row.num_booked
            self._counters["draft_tokens_total"] += len(piece.drafts)
            self._counters["accepted_draft_tokens_total"] += num_accepted
        taken: list[int] = []
        for token_id in result.token_ids[: 1 + num_accepted]:
            self._counters["output_tokens_total"] += 1
            is_end = token_id in sampling.stop_token_ids
            if is_end and self._may_end(row):
                logprobs = result.logprobs[: len(taken) + 1]
                end = TokenDelta(token_ids=tuple(taken), logprobs=logprobs)
                row.num_committed = min(row.num_committed, row.num_known)  # no drafts after it
                return self.delta(row, end, finish_reason="stop", stop_token_id=token_id)
            row.append((token_id,))
            taken.append(token_id)
        result.token_ids, result.logprobs = tuple(taken), result.logprobs[: len(taken)]
        self.drafting.settle(row, Verified(len(piece.drafts), num_accepted, len(taken)))
        if result.codes:
            row.output_frames.append(result.codes)
        if row.grammar is not None:  # the grammar decides whether that was the last
            self.mask_requests.append(row.mask_request(taken))
            return self.delta(row, result)
        if row.reasoning is not None and row.request.grammar and not row.reasoning.delays_grammar:
            row.grammar = GrammarState(row.request)
            self.grammar_starts.append(row)
        if len(row.output_ids) >= row.max_outputs:
            return self.delta(row, result, finish_reason="length")
        if row.grammar is None:  # else once its mask is known
            self.mask_requests += self.drafting.find(row)
        return self.delta(row, result)

    def _num_kept(self, piece: ScheduledRow, num_accepted: int) -> int:
        """The accepted drafts that need not be computed again.

        After a wrong draft, states of recurrent layers go back to before all drafts.
        """
        goes_back = self.pool.snapshots is not None and num_accepted < len(piece.drafts)
        return 0 if goes_back else num_accepted

    @staticmethod
    def _may_end(row: SequenceState) -> bool:
        """Whether a stop token ends the answer now."""
        is_open = row.reasoning is not None and row.reasoning.is_unanswered
        return len(row.output_ids) >= row.request.sampling.min_tokens and not is_open

    def apply_mask(self, row: SequenceState, found: TokenMask) -> TokenDelta | None:
        """Record a row's next token mask, and the tokens that its grammar forces.

        Returns the delta that the owner should send, as `accept` does.
        """
        assert row.grammar is not None, "masks are for rows with grammars"
        assert not row.num_in_flight, "a row waits for its mask"
        row.grammar.allowed, row.grammar.is_ready = found.allowed, True
        if found.forced_ids:
            row.append(found.forced_ids)
            self._counters["output_tokens_total"] += len(found.forced_ids)
            if row.is_decoding:
                row.is_decoding, row.num_forced = False, len(found.forced_ids)
        finish: FinishReason | None = "stop" if found.is_complete else None
        if finish is None and len(row.output_ids) >= row.max_outputs:
            finish = "length"
        if finish is None and row.is_answering:
            self.mask_requests += self.drafting.find(row, is_forced=bool(found.forced_ids))
        if finish is None and not found.forced_ids:
            return None
        return self.delta(row, TokenDelta(token_ids=found.forced_ids), finish_reason=finish)

    def delta(
        self,
        row: SequenceState,
        delta: TokenDelta | None = None,
        *,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
    ) -> TokenDelta:
        """Complete the delta of a step with the sequence's counts and log-probabilities."""
        delta = delta or TokenDelta()
        delta.finish_reason, delta.stop_token_id = finish_reason, stop_token_id
        delta.num_cached_tokens = row.num_cached_tokens
        delta.num_preemptions = row.num_preemptions
        delta.prompt_logprobs = tuple(row.prompt_logprobs)
        if row.prompt_logprobs:
            row.prompt_logprobs.clear()
        row.has_answered = True
        return delta

    def retry(self, live: list[ScheduledRow], later: Iterable[Any]) -> None:
        """Undo a step that ran out of memory, and retry it in smaller ones (`Retries`).

        Results of its rows in `later` steps are void, since they depend on this step.
        """
        for piece in live:
            piece.roll_back()
        rows = {piece.unit for piece in live}
        for piece in later:
            if isinstance(piece, ScheduledRow) and piece.unit in rows and not piece.is_stale:
                piece.is_stale = True
                piece.unit.num_unknown -= piece.is_sampled
        retries = self.state.retries
        (retries.halve if self.pool.snapshots is None else retries.restart)(live)

    def missing_for_next(self) -> str:
        """The resource that the next waiting sequence lacks to begin; empty if there is none."""
        row = next(iter(self.state.waiting), None)
        if row is None:
            return ""
        budget, pool = StepBudget(self.state), self.pool
        if budget.num_rows <= 0:
            return "batch_rows"
        if row.awaits_adapter:
            return "adapter"
        if row.awaited_key is not None:
            return "pages_in_progress"
        num_missing = pool.num_pages_for(row.num_tokens)
        if num_missing > budget.num_prompt_pages:  # without its cached pages, it may be less
            found = pool.peek(row.lookup_keys(pool.page_size))
            num_missing = budget.num_missing(num_missing, found)
        return "cache_pages" if num_missing > budget.num_prompt_pages else "step_tokens"

    def gauges(self) -> dict[str, float]:
        """The current page counts."""
        pool, adapters = self.pool, self.adapters
        windows = {} if pool.windows is None else pool.windows.gauges()
        return {
            "kv_pages": pool.num_pages,
            "kv_pages_leased": pool.num_leased,
            "kv_pages_cached": pool.num_cached,
            **windows,
            **({} if adapters is None else adapters.gauges()),
        }

    def with_pool_counters(self, stats: SchedulerStats) -> SchedulerStats:
        """`stats` with the counters of the pool."""
        counters = {
            **stats.counters,
            "kv_page_hits_total": self.pool.counters.num_hits,
            "kv_page_evictions_total": self.pool.counters.num_evictions,
        }
        return replace(stats, counters=counters)

    def check(self, rows: Iterable[Any]) -> None:
        """Assert that every page, slot and sequence is accounted for; `rows` are in flight."""
        self.pool.check()
        if self.adapters is not None:
            self.adapters.check()
        pieces: list[Any] = [row for row in rows if isinstance(row, ScheduledRow | DraftPiece)]
        self.state.check(pieces)
        if (drafter := self.drafting.drafter) is not None:
            drafter.check(self.state)
        self.pool.check_states(
            num_written=sum(len(piece.saves) for piece in pieces),
            num_read=sum(piece.restored >= 0 for piece in pieces),
        )

    def _count_start(self, row: SequenceState) -> None:
        row.has_started = True
        num_fetched = row.num_fetched_pages * self.pool.page_size
        row.num_cached_tokens = max(0, row.num_booked - num_fetched)
        self._counters["prompt_tokens_total"] += row.num_prompt_tokens
        self._counters["cached_tokens_total"] += row.num_cached_tokens

    def _preempt(self, row: SequenceState) -> None:
        """Take a row's pages and slot back; it is queued and will be computed again."""
        self._counters["preemptions_total"] += 1
        row.num_preemptions += 1
        self.state.running.remove(row)
        self._give_back(row)
        self.state.enqueue(row)
        row.prompt_logprobs.clear()

    def _give_back(self, row: SequenceState) -> None:
        """Take back all pages and slots of a row."""
        self.state.release(row)
        if (drafter := self.drafting.drafter) is not None:
            drafter.release(row)
