"""Continuous batching of token models: chunked prompts, paged memory, preemption.

Owns the life of token jobs from submission to their last delta. Which rows run next is the policy
of `token_draft`; this file books what it chose, and records what came of it. Knows no tensors.

Plans may overlap: the next one is booked while one or more are in flight. The counts of rows in
flight are known then, the values of their tokens are not. A row that turns out to have ended
leaves with the last step that still computes it: those results are dropped, and only then are its
pages and slot free, since until then the device may write to them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice

from triptych.core.config import ScheduleOptions
from triptych.core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NonFinite,
    OutOfMemory,
    Overloaded,
    TriptychError,
    to_info,
)
from triptych.core.job import Job, JobState, Output
from triptych.core.kv.keys import root_key
from triptych.core.kv.pages import PagePool
from triptych.core.plan import (
    Plan,
    SlotStart,
    StepResult,
    TokenPlan,
    TokenRowResult,
    TokenStepResult,
)
from triptych.core.tokens import FinishReason, TokenDelta, TokenRequest
from triptych.schedulers.base import Proposal, SchedulerStats
from triptych.schedulers.token_draft import (
    NO_HOLD,
    AdmittedRow,
    TokenDraft,
    TokenLimits,
    make_draft,
)
from triptych.schedulers.token_pace import ChunkPace
from triptych.schedulers.token_state import (
    ScheduledRow,
    SequenceState,
    TokenCounters,
    TokenProgress,
    TokenState,
    TokenStep,
)


@dataclass(frozen=True, slots=True)
class _TokenIntent:
    """A draft, what it left out, and the version of the state it was made from."""

    draft: TokenDraft
    hold: TokenLimits
    version: int


class TokenScheduler:
    """Implements `schedulers.base.Scheduler` for `TokenRequest` jobs of one model.

    `max_length` bounds prompt and output together; `namespace` is the digest of the weights.
    Only a model that `takes_content` is given requests with any.
    """

    def __init__(
        self,
        *,
        model: str,
        pool: PagePool,
        options: ScheduleOptions,
        max_length: int,
        namespace: bytes,
        takes_content: bool = False,
    ) -> None:
        self._model = model
        self._pool = pool
        self._options = options
        self._max_length = max_length
        self._namespace = namespace
        self._takes_content = takes_content
        self._state = TokenState(pool=pool, options=options)
        self._pace = ChunkPace(options.max_step_s)
        self._has_company = False
        self._counters = TokenCounters()
        self._num_submitted = 0
        self._version = 0

    def submit(self, job: Job) -> None:
        """Queue `job`. Raises InvalidRequest, ContextLengthExceeded or Overloaded."""
        request = job.request
        assert isinstance(request, TokenRequest), "the API sends this model token requests"
        assert job.job_id not in self._state.rows, "job ids are unique"
        max_outputs = self._max_outputs(request)
        if len(self._state.rows) >= self._options.max_queue_size + self._options.max_batch_size:
            raise Overloaded("The queue is full; try again later.", retry_after_s=1.0)
        is_ranked = self._options.schedule_policy == "priority"
        row = SequenceState(
            job=job,
            request=request,
            rank=(-request.priority if is_ranked else 0, self._num_submitted),
            max_outputs=max_outputs,
            root=root_key(self._namespace, adapter=request.adapter, tenant=request.tenant),
            is_paused=job.is_paused,
        )
        if self._pool.enable_prefix_caching:
            row.extend_keys(row.num_prompt_tokens // self._pool.page_size, self._pool.page_size)
        self._num_submitted += 1
        self._version += 1
        self._state.rows[job.job_id] = row
        self._state.enqueue(row)

    def cancel(self, job_id: str) -> None:
        """End a job with a last delta that says so; an unknown or ended one is ignored."""
        row = self._state.rows.get(job_id)
        if row is not None:
            self._version += 1
            self._send(row, finish_reason="cancelled")
            self._end(row, JobState.CANCELLED)

    def set_paused(self, job_id: str, is_paused: bool) -> None:
        """Leave a job out of steps, or let it go on; an unknown or ended one is ignored."""
        row = self._state.rows.get(job_id)
        if row is None or row.is_paused == is_paused:
            return
        self._version += 1
        self._state.set_paused(row, is_paused)

    def abort(self, job_id: str, error: TriptychError) -> None:
        """End a job with `error`; an unknown or ended one is ignored."""
        row = self._state.rows.get(job_id)
        if row is not None:
            self._version += 1
            self._fail_row(row, error)

    def waiting_ids(self, most: int) -> list[str]:
        """The first jobs of the queue, by rank."""
        return [row.job.job_id for row in islice(self._state.waiting, most)]

    def num_committed(self, job_id: str) -> int | None:
        """Positions of a job that are surely computed; `None` if it has ended."""
        row = self._state.rows.get(job_id)
        return None if row is None else row.num_committed

    def num_covered(self, job_id: str) -> int:
        """Leading positions of a job that has not ended which are computed, in flight or cached."""
        row, page_size = self._state.rows[job_id], self._pool.page_size
        if row.lease is not None:
            return row.num_booked
        return len(self._pool.peek(row.lookup_keys(page_size))) * page_size

    def check_size(self, request: TokenRequest) -> None:
        """Raise InvalidRequest or ContextLengthExceeded if the request can never run here."""
        self._max_outputs(request)

    def progress(self, job_id: str) -> TokenProgress:
        """How far a job is that has not ended."""
        row = self._state.rows[job_id]
        return TokenProgress(
            num_left=row.num_tokens - self.num_covered(job_id),
            num_outputs=len(row.output_ids) + row.num_unknown,
            can_step=row.can_step,
            is_waiting=row.lease is None,
            is_answered=row.is_decoding,
        )

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt there may be."""
        page_size, limit = self._pool.page_size, self._options.max_batch_total_tokens
        most = self._max_length - 1
        return min(most, limit // page_size * page_size) if limit else most

    @property
    def num_free_rows(self) -> int:
        """Jobs that could start if there are pages for them."""
        return len(self._state.free_slots)

    @property
    def num_jobs(self) -> int:
        """Jobs that have not ended."""
        return len(self._state.rows)

    def set_gap(self, gap_s: float) -> None:
        """Where other models have jobs, prompts are cut so that no step is long."""
        self._has_company = math.isfinite(gap_s)

    def propose(self, now_s: float, hold: TokenLimits = NO_HOLD) -> Proposal | None:
        """The next step, or none while all depends on steps in flight or on slow readers.

        `hold` is for whoever drives this scheduler by a policy of its own.
        """
        if self._has_company and self._options.enable_chunked_prefill:
            most = min(hold.max_prompt_tokens, self._pace.max_tokens)
            hold = replace(hold, max_prompt_tokens=most)
        draft = make_draft(self._state, hold)
        if not draft.pieces:
            return None
        num_tokens = sum(piece.num_tokens for piece in draft.pieces)
        return Proposal(
            model=self._model,
            kind=draft.kind,
            work={
                "decode_rows": draft.num_decode_rows,
                "prompt_tokens": num_tokens - draft.num_decode_rows,
                "context_tokens": sum(piece.start + piece.num_tokens for piece in draft.pieces),
            },
            due_s=min(self._due_s(piece.row) for piece in draft.pieces),
            num_rows=len(draft.pieces),
            intent=_TokenIntent(draft, hold, self._version),
        )

    def book(self, proposal: Proposal, step_id: int, now_s: float) -> Plan | None:
        """Take slots and pages and make the plan; chooses anew if anything changed since."""
        intent = proposal.intent
        assert isinstance(intent, _TokenIntent), "a proposal of this scheduler"
        is_fresh = intent.version == self._version
        draft = intent.draft if is_fresh else make_draft(self._state, intent.hold)
        if not draft.pieces:
            return None
        self._version += 1
        self._take(draft, now_s)
        self._state.steps[step_id] = TokenStep(draft.pieces, draft.is_retry)
        return TokenPlan(
            step_id=step_id,
            model=self._model,
            kind=draft.kind,
            starts=tuple(_slot_start(p.row) for p in draft.pieces if not p.row.is_bound),
            rows=tuple(piece.book() for piece in draft.pieces),
        )

    def commit(self, plan: Plan, result: StepResult, now_s: float) -> None:
        """Record what a step yielded, make its full pages findable, and answer its jobs."""
        assert isinstance(plan, TokenPlan), "a plan of this scheduler"
        assert isinstance(result, TokenStepResult), "the token runner's result"
        assert plan.step_id == next(iter(self._state.steps)), "steps end in the order they began"
        self._version += 1
        step = self._state.steps.pop(plan.step_id)
        num_prompt_tokens = sum(row.num_tokens for row in plan.rows if row.token_ids)
        self._pace.observe(num_prompt_tokens, result.elapsed_s)
        for piece, row_result in zip(step.pieces, result.rows, strict=True):
            piece.row.num_in_flight -= 1
            if not piece.is_stale and not piece.row.is_done:
                self._accept(piece, row_result, now_s)
            self._settle(piece.row)

    def fail(self, plan: Plan, error: TriptychError, now_s: float) -> None:
        """End the jobs of a step that raised.

        Where it ran out of memory with several rows, each half of them is tried once more.
        """
        self._version += 1
        step, later = self._state.pop_step(plan.step_id)
        live = [p for p in step.pieces if not p.is_stale and not p.row.is_done]
        for piece in step.pieces:
            piece.row.num_in_flight -= 1
        for piece in live:
            piece.roll_back()
        rows = {piece.row for piece in live}
        for piece in (piece for other in later for piece in other.pieces):
            if piece.row in rows and not piece.is_stale:
                piece.is_stale = True
                piece.row.num_unknown -= piece.is_sampled
        if isinstance(error, OutOfMemory) and len(step.pieces) > 1 and not step.is_retry:
            self._state.retry(live)
        else:
            for piece in live:
                self._fail_row(piece.row, error)
        for piece in step.pieces:
            self._settle(piece.row)

    def stats(self) -> SchedulerStats:
        """Counts for metrics: pages now, and totals of tokens, hits, evictions and preemptions."""
        pool, state, counters = self._pool, self._state, self._counters
        return SchedulerStats(
            num_waiting=len(state.waiting) + len(state.held_back),
            num_running=len(state.running),
            gauges={
                "jobs_paused": sum(row.is_paused for row in state.rows.values()),
                "kv_pages": pool.num_pages,
                "kv_pages_leased": pool.num_leased,
                "kv_pages_cached": pool.num_cached,
            },
            counters={
                "prompt_tokens_total": counters.num_prompt_tokens,
                "cached_tokens_total": counters.num_cached_tokens,
                "output_tokens_total": counters.num_output_tokens,
                "preemptions_total": counters.num_preemptions,
                "non_finite_total": counters.num_non_finite,
                "kv_page_hits_total": pool.counters.num_hits,
                "kv_page_evictions_total": pool.counters.num_evictions,
            },
        )

    def check(self) -> None:
        """Assert that every page, slot and row is accounted for."""
        self._pool.check()
        self._state.check()

    def _max_outputs(self, request: TokenRequest) -> int:
        """Most tokens the request may yield. Raises if it can never run here."""
        if request.contents and not self._takes_content:
            raise InvalidRequest("This model takes no pictures.", param="messages")
        num_prompt = len(request.prompt_ids)
        if not num_prompt:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        if num_prompt >= self._max_length:
            raise ContextLengthExceeded(
                f"The prompt has {num_prompt} tokens; this model takes {self._max_length} tokens,"
                " prompt and output together."
            )
        max_outputs = min(request.sampling.max_tokens, self._max_length - num_prompt)
        capacity = self._pool.num_pages * self._pool.page_size
        if num_prompt + max_outputs - 1 > capacity:
            raise ContextLengthExceeded(
                f"Prompt and output may take {num_prompt + max_outputs} tokens; the KV cache holds"
                f" {capacity}. Ask for fewer tokens (max_tokens), or enlarge the cache."
            )
        limit = self._options.max_batch_total_tokens
        if limit and self._pool.num_pages_for(num_prompt) * self._pool.page_size > limit:
            raise ContextLengthExceeded(
                f"The prompt has {num_prompt} tokens; max_batch_total_tokens allows {limit},"
                " counted in whole pages."
            )
        return max_outputs

    def _due_s(self, row: SequenceState) -> float:
        """When the row's next token is due. Tokens in flight count as on time."""
        if not row.has_answered:
            return row.job.arrival_s + self._options.target_first_token_s
        return row.last_token_s + (1 + row.num_unknown) * self._options.target_inter_token_s

    def _take(self, draft: TokenDraft, now_s: float) -> None:
        """Give and take pages and slots as drafted.

        Cached pages are pinned before any page is handed out, lest one evicts the other.
        """
        if draft.is_retry:
            self._state.retries.popleft()
        for victim in draft.victims:
            self._preempt(victim)
        for row, key in draft.awaited:
            row.awaited_key = key
        for row in draft.passed:
            row.num_times_passed += 1
        for admission in draft.admissions:
            keys = admission.row.keys[: admission.num_cached]
            admission.row.lease = self._pool.acquire(keys)
            assert len(admission.row.lease) == admission.num_cached, "what was found is still there"
        for piece in draft.pieces:
            lease = piece.row.lease
            if piece.row.is_decoding and lease is not None:
                num_pages = self._pool.num_pages_for(piece.start + 1)
                self._pool.extend(lease, num_pages - len(lease))
        for admission in draft.admissions:
            self._start(admission, now_s)

    def _start(self, admission: AdmittedRow, now_s: float) -> None:
        row = admission.row
        self._state.admit(row, admission.num_pages)
        row.job.state = JobState.RUNNING
        if "scheduled_s" not in row.job.timings:
            row.job.timings["scheduled_s"] = now_s
            row.num_cached_tokens = row.num_booked
            self._counters.num_prompt_tokens += row.num_prompt_tokens
            self._counters.num_cached_tokens += row.num_cached_tokens

    def _preempt(self, row: SequenceState) -> None:
        """Take a row's pages and slot back; it waits and will be computed again."""
        self._counters.num_preemptions += 1
        row.num_preemptions += 1
        row.job.state = JobState.WAITING
        self._state.running.remove(row)
        self._state.release(row)
        self._state.enqueue(row)
        row.prompt_logprobs.clear()

    def _accept(self, piece: ScheduledRow, result: TokenRowResult, now_s: float) -> None:
        row = piece.row
        row.num_committed = piece.start + piece.num_tokens
        row.num_unknown -= piece.is_sampled
        if not result.is_finite:
            assert row.lease is not None, "a running row holds a lease"
            self._pool.forget(row.lease)
            self._counters.num_non_finite += 1
            self._fail_row(row, NonFinite("The model computed no finite values for this request."))
            return
        self._state.publish(row)
        if not row.has_answered:
            row.prompt_logprobs += result.prompt_logprobs
        if piece.is_sampled:
            self._answer(row, result, now_s)

    def _answer(self, row: SequenceState, result: TokenRowResult, now_s: float) -> None:
        """Send the token a step has drawn, or the end of the answer."""
        sampling = row.request.sampling
        if sampling.returns_state:
            self._send(row, result, finish_reason="stop")
            self._end(row, JobState.FINISHED)
            return
        (token_id,) = result.token_ids
        self._counters.num_output_tokens += 1
        row.last_token_s = now_s
        row.job.timings.setdefault("first_token_s", now_s)
        if token_id in sampling.stop_token_ids and len(row.output_ids) >= sampling.min_tokens:
            self._send(row, finish_reason="stop", stop_token_id=token_id)
            self._end(row, JobState.FINISHED)
            return
        row.output_ids.append(token_id)
        if result.codes:
            row.output_frames.append(result.codes)
        if len(row.output_ids) < row.max_outputs:
            self._send(row, result)
            return
        self._send(row, result, finish_reason="length")
        self._end(row, JobState.FINISHED)

    def _send(
        self,
        row: SequenceState,
        result: TokenRowResult | None = None,
        *,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
    ) -> None:
        delta = TokenDelta(
            token_ids=result.token_ids if result else (),
            logprobs=result.logprobs if result else (),
            prompt_logprobs=tuple(row.prompt_logprobs),
            state=result.state if result else b"",
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=row.num_cached_tokens,
            num_preemptions=row.num_preemptions,
        )
        row.prompt_logprobs.clear()
        row.has_answered = True
        is_final = finish_reason is not None
        row.job.sink(Output(job_id=row.job.job_id, payload=delta, is_final=is_final))

    def _fail_row(self, row: SequenceState, error: TriptychError) -> None:
        row.job.sink(Output(job_id=row.job.job_id, is_final=True, error=to_info(error)))
        self._end(row, JobState.FAILED)

    def _end(self, row: SequenceState, job_state: JobState) -> None:
        """Let the row go; what it holds is freed once no step in flight uses it."""
        row.job.state = job_state
        self._state.leave(row)
        self._settle(row)

    def _settle(self, row: SequenceState) -> None:
        if row in self._state.leaving and not row.num_in_flight:
            self._state.leaving.remove(row)
            self._state.release(row)


def _slot_start(row: SequenceState) -> SlotStart:
    return SlotStart(
        slot=row.slot,
        sampling=row.request.sampling,
        history_ids=row.token_ids(0, row.num_known),
        num_prompt_tokens=row.num_prompt_tokens,
        frames=(*row.request.prompt_frames, *row.output_frames),
        contents=tuple(content.span for content in row.request.contents),
    )
