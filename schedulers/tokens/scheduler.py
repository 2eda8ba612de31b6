"""Jobs of token models: each is one sequence of a `TokenBatch`.

Owns the answers of jobs, the due times of their tokens, and how much of a prompt a step takes while
other models run. Knows no tensors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from triptych.core.engine_api.job import Job, JobState, Output
from triptych.core.engine_api.job_report import PREEMPTED
from triptych.core.engine_api.plan import Plan, StepResult
from triptych.core.engine_api.tokens import (
    AdapterDrop,
    AdapterLoad,
    CacheAction,
    TokenDelta,
    TokenRequest,
)
from triptych.core.errors import InvalidRequest, NonFinite, TriptychError, UnsupportedOption
from triptych.core.grammar.matcher import DraftMasks
from triptych.core.kv.pages import PagePool
from triptych.core.options.config import ScheduleOptions
from triptych.schedulers.base import SchedulerStats
from triptych.schedulers.batcher import Batcher
from triptych.schedulers.executors import Post
from triptych.schedulers.tokens.batch import COUNTERS, TokenBatch
from triptych.schedulers.tokens.draft_costs import DraftCosts
from triptych.schedulers.tokens.draft_model import DraftModel, DraftPiece, DraftStep
from triptych.schedulers.tokens.draft_search import check_drafts
from triptych.schedulers.tokens.grammar_worker import GrammarState, GrammarWorker, MaskResults
from triptych.schedulers.tokens.page_exchange import PageExchange
from triptych.schedulers.tokens.scheduled_row import ScheduledRow
from triptych.schedulers.tokens.state import SequenceState
from triptych.schedulers.tokens.step import UNLIMITED, TokenLimits, TokenStep
from triptych.schedulers.tokens.step_shares import StepShares, StepTurn

_LEAST_TOKENS = 32  # of prompts in a step whose time counts as a measurement of them
_USUAL_TOKENS = 256  # the prompt length for which the seconds of a token are reported
_STEP_PART = 0.25
"""The longest step with prompts, as a part of the target for first tokens: a prompt waits for the
step that runs when it arrives, and shares its own steps with others."""
_CHUNK = "prompt_chunk"  # the kind of work counted by prompt tokens alone


class TokenScheduler(Batcher[SequenceState, TokenStep, Any]):
    """Schedules the `TokenRequest` jobs of one model.

    `max_length` bounds prompt and output together; `namespace` is the digest of the weights.
    """

    _takes_content = False

    def __init__(
        self,
        *,
        model: str,
        pool: PagePool,
        options: ScheduleOptions,
        max_length: int,
        namespace: bytes,
    ) -> None:
        assert min(options.max_batch_size, options.max_batch_input_tokens) > 0, "chosen at load"
        max_jobs = options.max_queue_size + options.max_batch_size
        super().__init__(model=model, max_jobs=max_jobs, counters=COUNTERS)
        self.tokens = TokenBatch(
            pool=pool,
            options=options,
            max_length=max_length,
            namespace=namespace,
            counters=self._counters,
        )
        self.limits = UNLIMITED
        """The rows kept out of steps."""
        self.grammar_worker: GrammarWorker | None = None
        """Computes masks of rows with grammars; set before jobs come, if there may be any."""
        self.exchange = PageExchange()
        """Exchanges pages with other engines or lower tiers; set before jobs come."""
        self._rows_by_grammar: dict[GrammarState, SequenceState] = {}
        self._options = options
        self._state = self.tokens.state
        self._step_shares = StepShares(self.costs)
        self._use_costs(DraftCosts())

    def draft_with(self, drafter: DraftModel) -> None:
        """Let a smaller model draft; before jobs come."""
        self.tokens.drafting.drafter = drafter
        self._use_costs(drafter.costs)

    def _use_costs(self, costs: DraftCosts) -> None:
        """Measure drafts with these costs."""
        costs.computes_again = self.tokens.pool.snapshots is not None
        self._draft_costs, self.tokens.drafting.price = costs, costs.price

    def connect(self, post: Post) -> None:
        """Register `post`, which schedules a call on the loop thread, with all helper threads."""
        self.exchange.connect(post)
        if (adapters := self.tokens.adapters) is not None:
            adapters.on_ready, adapters.on_failed = self.note_change, self._fail_opened
            adapters.connect(post)
        if self.grammar_worker is not None:
            self.grammar_worker.on_masks = self._take_masks
            self.grammar_worker.connect(post)

    def stats(self) -> SchedulerStats:
        """Counts for metrics: pages now, and totals of tokens, hits, evictions and preemptions."""
        return self.exchange.add_stats(self.tokens.with_pool_counters(super().stats()))

    def row_of(self, job_id: str) -> SequenceState | None:
        """The sequence of a job that has not ended."""
        return self._jobs.get(job_id)

    def check(self) -> None:
        """Assert that every page, slot and row is accounted for."""
        self.tokens.check(self._rows_in_flight())
        assert set(self._jobs.values()) == self._state.rows

    # Jobs.

    def submit(self, job: Job) -> None:
        """Accept a job; one with a cache action has ended when this returns.

        Loads and drops of adapters are no rows.
        """
        if isinstance(job.request, AdapterLoad | AdapterDrop):
            self._change_adapters(job)
        elif job.request.cache_action:
            self._end_action(job)
        else:
            super().submit(job)

    def _change_adapters(self, job: Job) -> None:
        if (adapters := self.tokens.adapters) is None:
            raise UnsupportedOption("This model takes no adapters.", param="lora_name")
        if isinstance(job.request, AdapterLoad):
            adapters.load(job)
        else:
            adapters.drop(job)

    def _end_action(self, job: Job) -> None:
        row = self._open(job)
        self._version += 1
        delta = self.tokens.delta(row, finish_reason="stop")
        num_pages = self._act_on_cache(row, job.request.cache_action)
        delta.num_cached_tokens = num_pages * self.tokens.pool.page_size
        job.state = JobState.FINISHED
        job.sink(Output(job_id=job.job_id, payload=delta, is_final=True))

    def _act_on_cache(self, row: SequenceState, action: CacheAction) -> int:
        """Keep or drop the pages of a prompt; returns how many of its first ones there were."""
        pool, exchange = self.tokens.pool, self.exchange
        drafter = self.tokens.drafting.drafter
        if action == "clear":
            exchange.clear()
            if drafter is not None:
                drafter.pool.forget_all()
            return pool.forget_all()
        keys = self.tokens.prompt_keys(row)
        num_indexed = pool.num_indexed(keys)
        found = keys[: num_indexed + exchange.num_kept(keys[num_indexed:])]
        if action == "pin":
            return exchange.pin(found, row.request.tenant)
        if action == "unpin":
            exchange.unpin(found)
        else:  # all, as parts of a page may outlast the others
            pool.forget(keys)
            exchange.drop(keys)
            if drafter is not None:
                drafter.pool.forget(keys)
        return len(found)

    def _open(self, job: Job) -> SequenceState:
        request = job.request
        assert isinstance(request, TokenRequest), "the API sends this model token requests"
        if request.contents and not self._takes_content:
            raise InvalidRequest("This model takes no images.", param="messages")
        if (request.grammar or request.reasoning) and self.grammar_worker is None:
            raise UnsupportedOption("This model has neither structured outputs nor reasoning.")
        if request.adapter and self.tokens.adapters is None:
            raise UnsupportedOption("This model takes no adapters.", param="model")
        return self.tokens.open(job.job_id, job, request, arrival_s=job.arrival_s)

    def _on_submit(self, opened: SequenceState) -> None:
        self.tokens.add(opened)
        self.exchange.on_submit(opened)
        self._begin(opened)

    def _begin(self, row: SequenceState) -> None:
        """Request the first mask of a row's grammar, if it has one."""
        if row.grammar is not None and self.grammar_worker is not None:
            self._rows_by_grammar[row.grammar] = row
            self.grammar_worker.begin(row.mask_request())

    def _on_pause(self, opened: SequenceState) -> None:
        self._state.set_paused(opened, opened.is_paused)

    def _cancel_payload(self, opened: SequenceState) -> TokenDelta:
        return self.tokens.delta(opened, finish_reason="cancelled")

    def _counts_of(self, opened: SequenceState) -> Mapping[str, int]:
        return {
            "prompt_tokens": opened.num_prompt_tokens,
            "cached_tokens": opened.num_cached_tokens,
            "fetched_tokens": opened.num_fetched_pages * self.tokens.pool.page_size,
            "output_tokens": len(opened.output_ids),
            "preemptions": opened.num_preemptions,
        }

    def _on_end(self, opened: SequenceState) -> None:
        if opened.grammar is not None:
            self._rows_by_grammar.pop(opened.grammar, None)
        self.exchange.on_end(opened)
        self.tokens.close(opened)

    def _num_waiting(self) -> int:
        return len(self._state.waiting) + len(self._state.held_back)

    def _gauges(self) -> dict[str, float]:
        gauges = self.tokens.gauges()
        if self.costs.is_timed(_CHUNK, {"tokens": 0}):
            chunk_s = self.costs.trend(_CHUNK, {"tokens": _USUAL_TOKENS})
            gauges["token_seconds"] = chunk_s / _USUAL_TOKENS
        return gauges

    # Steps.

    def _choose_step(self, now_s: float) -> TokenStep | None:
        drafter = self.tokens.drafting.drafter
        step = None if drafter is None else drafter.choose(self._state)
        if drafter is None or step is None:
            return self._choose_own_step(now_s)
        own = self._choose_own_step(now_s)
        if drafter.yields and own is not None:
            return own
        if self._steps:  # its rows are verified together
            return None
        step.due_s = min(self._due_s(step.rows), math.inf if own is None else own.due_s)
        return step

    def _choose_own_step(self, now_s: float) -> TokenStep | None:
        """The next step of the model itself."""
        limits, turn = self.limits, None
        options = self._options
        budget_s = min(self._step_budget_s, _STEP_PART * options.target_first_token_s)
        if self._state.shares.is_contended:
            answering = self._answering()
            if answering:
                budget_s = min(budget_s, options.max_step_s)
            turn = self._step_shares.turn(answering)
        if options.enable_chunked_prefill and options.max_step_s > 0:
            most = min(limits.max_prompt_tokens, self._max_prompt_tokens(budget_s))
            limits = replace(limits, max_prompt_tokens=most)
        step = self._choose_in_turn(limits, turn)
        if step is not None:
            step.turn = turn
            step.due_s = self._due_s(step.rows)
        return step

    def _choose_in_turn(self, limits: TokenLimits, turn: StepTurn | None) -> TokenStep | None:
        """The next step, without the busiest client if it stays out and others can run."""
        if turn is None:
            return self.tokens.choose_step(limits)
        if turn.stays_out:
            step = self.tokens.choose_step(replace(limits, clients=frozenset((turn.busiest,))))
            others = [row for row in self._answering() if row.client != turn.busiest]
            if step or any(row.num_in_flight or row.is_awaited for row in others):
                return step
        return self.tokens.choose_step(replace(limits, max_answering=turn.max_rows))

    def _due_s(self, pieces: Sequence[ScheduledRow]) -> float:
        """When the first of the rows' next tokens is due. Tokens in flight count as on time."""
        options, rows = self._options, [piece.unit for piece in pieces]
        return min(
            [
                row.last_token_s + (1 + row.num_unknown) * options.target_inter_token_s
                if row.has_answered
                else row.arrival_s + options.target_first_token_s
                for row in rows
            ]
        )

    def _max_prompt_tokens(self, budget_s: float) -> int:
        """How many prompt tokens fit into the step's budget.

        Other rows wait for the step to end, so a prompt is cut by time: the same number of tokens
        takes a moment on one device and a second on another.
        """
        if all(row.is_decoding for row in self._state.running) and not self._state.waiting:
            return sys.maxsize
        limit = self._options.max_batch_input_tokens
        return self.costs.work_within(_CHUNK, "tokens", budget_s, limit)

    def _answering(self) -> list[SequenceState]:
        return [row for row in self._state.running if row.is_answering and not row.is_paused]

    def _book_step(self, step: TokenStep, step_id: int, now_s: float) -> tuple[Plan, Sequence[Any]]:
        if (drafter := self.tokens.drafting.drafter) is not None:
            drafter.yields = False
            if isinstance(step, DraftStep):
                return drafter.book(step, self._model, step_id, self._state.shares), step.rows
        if self._state.shares.is_contended:
            answering = (piece.unit for piece in step.rows if piece.unit.is_answering)
            self._step_shares.book(step.turn, answering)
        for victim in step.victims:
            victim.job.state = JobState.WAITING
            victim.job.recorder.wait(PREEMPTED, now_s)
            self.exchange.on_preempt(victim)
        for admission in step.admissions:
            job = admission.row.job
            job.state = JobState.RUNNING
            job.timings.setdefault("scheduled_s", now_s)
        plan = self.tokens.take(step, self._model, step_id)
        if missing := self.tokens.missing_for_next():
            next(iter(self._state.waiting)).job.recorder.sit_out(missing)
        return plan, step.rows

    def _parts_of(self, step: TokenStep) -> Iterator[tuple[Job, str]]:
        return ((row.unit.job, row.stage) for row in step.rows)

    def _learn(self, step: TokenStep, kind: str, result: StepResult) -> None:
        super()._learn(step, kind, result)
        drafter = self.tokens.drafting.drafter
        if drafter is not None and isinstance(step, DraftStep):
            drafter.learn(step, len(self._state.running), result)
            return
        if self.tokens.drafting.is_on and "decode_rows" in step.work:
            self._draft_costs.observe(step.rows, result)
        if kind == "decode":
            self._step_shares.observe(len(step.rows), result.elapsed_s)
        num_tokens = step.work.get("prompt_tokens", 0)
        if num_tokens >= _LEAST_TOKENS:
            self.costs.observe(_CHUNK, {"tokens": num_tokens}, result.elapsed_s)

    def _is_void(self, row: Any) -> bool:
        return bool(row.is_stale or row.unit.is_over)

    def _accept(self, step: TokenStep, row: Any, found: Any, now_s: float) -> None:
        """Send the token that a step sampled, or the end of the answer."""
        if isinstance(row, DraftPiece):
            assert self.tokens.drafting.drafter is not None, "it made the step"
            self.tokens.drafting.drafter.accept(row, found)
            self.tokens.mask_requests += check_drafts(row.unit)
            return
        opened, delta = row.unit, self.tokens.accept(row, found, now_s)
        if isinstance(delta, NonFinite):
            self._end(opened, JobState.FAILED, error=delta)
            return
        if delta is None:
            return
        timings = opened.job.timings
        if "first_token_s" not in timings:
            self.exchange.on_answer(opened)
            if not delta.state:
                timings["first_token_s"] = now_s
        self._send_delta(opened, delta)

    def _send_delta(self, opened: SequenceState, delta: TokenDelta) -> None:
        if delta.finish_reason is None:
            self._send(opened, delta)
        else:
            self._end(opened, JobState.FINISHED, payload=delta)

    def _on_step_end(self, now_s: float) -> None:
        """Queue the mask computation for all rows of the step at once."""
        self.exchange.on_step_end()
        begun, self.tokens.grammar_starts = self.tokens.grammar_starts, []
        for row in begun:
            if not row.is_over:
                self._begin(row)
        self._request_masks()

    def _request_masks(self) -> None:
        requests, self.tokens.mask_requests = self.tokens.mask_requests, []
        if requests and self.grammar_worker is not None:
            self.grammar_worker.follow(requests)

    def _take_masks(self, found: MaskResults) -> None:
        """Resume rows whose masks are computed; a job may have ended meanwhile."""
        self._version += 1
        for grammar, allowance in found:
            opened = self._rows_by_grammar.get(grammar)
            if opened is None:
                continue
            if isinstance(allowance, TriptychError):
                self._end(opened, JobState.FAILED, error=allowance)
                continue
            if isinstance(allowance, DraftMasks):
                self.tokens.drafting.keep(opened, allowance)
                continue
            grammar.observe(allowance.elapsed_s)
            delta = self.tokens.apply_mask(opened, allowance)
            if delta is not None:
                self._send_delta(opened, delta)
        self._request_masks()

    def _retry(self, step: TokenStep, live: list[Any], later: Iterable[Any]) -> bool:
        if step.is_retry or isinstance(step, DraftStep):
            return False
        self.tokens.retry(live, later)
        return True

    def _fail_row(self, row: Any, error: TriptychError) -> None:
        if isinstance(row, DraftPiece):  # the answer goes on without
            assert self.tokens.drafting.drafter is not None, "it made the step"
            self.tokens.drafting.drafter.give_up(row.unit)
            return
        self._fail_opened(row.unit, error)

    def _fail_opened(self, opened: SequenceState, error: TriptychError) -> None:
        self._version += 1
        self._end(opened, JobState.FAILED, error=error)

    def _settle(self, row: Any) -> None:
        self.tokens.settle(row)
