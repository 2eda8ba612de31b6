"""A token model that computes nothing but knows what every page should hold.

`ShadowRunner` writes into each cache position a digest of all tokens up to there, and checks on
every step that what a row reads is exactly its own past. The token it "samples" is a function of
that past, so whatever the scheduler does (chunks, preemption, cache hits, batching), a job's
output is known beforehand. `World` drives a scheduler and this runner like the engine does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from support.driver import SchedulerDriver
from support.schedules import schedule_of
from support.shadow_drafts import ShadowDrafts, ShadowHead, draft_model
from support.shadow_states import ShadowStates
from support.shadow_story import VOCAB_SIZE, ExpectedTokens
from support.shadow_windows import ShadowWindows
from triptych.core.engine_api.plan import (
    DraftPlan,
    Plan,
    StepResult,
    TokenPlan,
    TokenRow,
)
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta, TokenLogprob, TokenRequest
from triptych.core.errors import RequestError, TriptychError, Unavailable
from triptych.core.kv.pages import PagePool
from triptych.core.kv.windows import WindowSize
from triptych.core.runtime.engine.draft_runner import DraftingRunner
from triptych.schedulers.base import Proposal
from triptych.schedulers.tokens.scheduler import TokenScheduler

MODEL = "shadow"
NAMESPACE = b"weights"


def token_request(
    prompt_ids: tuple[int, ...],
    *,
    priority: int = 0,
    tenant: str = "",
    adapter: str = "",
    **sampling: object,
) -> TokenRequest:
    """A request with the sampling parameters that matter to scheduling."""
    return TokenRequest(
        prompt_ids=prompt_ids,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        priority=priority,
        tenant=tenant,
        adapter=adapter,
    )


def expected_answer(request: TokenRequest, max_length: int) -> tuple[tuple[int, ...], str]:
    """Output ids and finish reason of a request that runs to its end."""
    expected, num_prompt = ExpectedTokens(request), len(request.prompt_ids)
    limit = min(request.sampling.max_tokens, max_length - num_prompt)
    output: list[int] = []
    while len(output) < limit:
        token_id = expected.sampled_after(num_prompt + len(output))
        may_stop = len(output) >= request.sampling.min_tokens
        if may_stop and token_id in request.sampling.stop_token_ids:
            return tuple(output), "stop"
        output.append(token_id)
    return tuple(output), "length"


class StoryDrafts:
    """Drafts of a job's own answer, each token wrong with a probability."""

    def __init__(self, request: TokenRequest, rng: random.Random, error: float) -> None:
        self._story, self._rng, self._error = ExpectedTokens(request), rng, error
        self.num_tokens = 0

    def take(self, token_ids: Sequence[int], num_rows: int) -> None:
        self.num_tokens += len(token_ids)

    def find(self, most: int, *_: object) -> tuple[int, ...]:
        size = min(most, self._rng.randrange(6))
        right = [self._story.sampled_after(self.num_tokens + n) for n in range(max(0, size))]
        return tuple((n + (self._rng.random() < self._error)) % VOCAB_SIZE for n in right)

    def settle(self, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts


@dataclass
class Slot:
    """What the shadow device keeps for a batch slot."""

    job_id: str = ""
    page_ids: list[int] = field(default_factory=list)
    last_token: int = -1


@dataclass
class Page:
    """A page of the shadow cache: a digest per position, the step that wrote it, and for whom."""

    digests: list[bytes]
    step_ids: list[int]
    job_id: str = ""


class ShadowRunner:
    """Runs plans at once, in order, as a device stream would.

    A step of n rows takes `step_s(n)`. With `has_states` a row also has a recurrent state, with
    `windows` pages of window layers.
    """

    has_states = False
    windows: ShadowWindows | None = None

    def __init__(
        self, *, num_pages: int, page_size: int, requests: dict[str, TokenRequest]
    ) -> None:
        self.page_size = page_size
        self.requests = requests
        self.stories: dict[str, ExpectedTokens] = {}
        self.pages = [Page([b""] * page_size, [-1] * page_size) for _ in range(num_pages)]
        self.slots: dict[int, Slot] = {}
        self.states = ShadowStates()
        self.in_flight: dict[int, list[tuple[str, int, set[int]]]] = {}
        self.num_computed_tokens = 0
        self.bad_jobs: set[str] = set()
        self.step_s: Callable[[int], float] = lambda num_rows: 0.0

    def run(self, plan: TokenPlan) -> StepResult:
        """Compute a plan; it stays in flight until `finish`."""
        assert plan.rows, "a plan has rows"
        self._bind(plan)
        self._check_fences(plan)
        self.in_flight[plan.step_id] = [
            (row.job_id, row.slot, set(self.slots[row.slot].page_ids)) for row in plan.rows
        ]
        if self.has_states:
            self.states.begin(plan, self.in_flight.keys())
        if self.windows is not None:
            self.windows.begin(plan)
        results = tuple(self._run_row(row, plan.step_id) for row in plan.rows)
        if self.has_states:
            self.states.end(plan, self.stories)
        return StepResult(rows=results, elapsed_s=self.step_s(len(plan.rows)))

    def finish(self, plan: TokenPlan) -> None:
        """The engine has seen the end of the plan."""
        del self.in_flight[plan.step_id]
        if self.windows is not None:
            del self.windows.in_flight[plan.step_id]

    def spoil(self, plan: TokenPlan) -> None:
        """The plan raised: what it, and what came after it for its rows, wrote is garbage."""
        job_ids = {row.job_id for row in plan.rows}
        for page in self.pages:
            if page.job_id in job_ids:
                for index, step_id in enumerate(page.step_ids):
                    if step_id >= plan.step_id:
                        page.digests[index] = b"garbage"
        self.states.spoil(plan)
        if self.windows is not None:
            self.windows.spoil(plan)

    def _bind(self, plan: TokenPlan) -> None:
        job_ids = {row.slot: row.job_id for row in plan.rows}
        assert len(job_ids) == len(plan.rows), "a slot is used twice"
        for start in plan.starts:
            request = self.requests[job_ids[start.slot]]
            assert start.history_ids[: start.num_prompt_tokens] == request.prompt_ids
            self.slots[start.slot] = Slot(job_id=job_ids[start.slot])
        for row in plan.rows:
            assert self.slots[row.slot].job_id == row.job_id, "the slot is another job's"
            self.slots[row.slot].page_ids += row.new_page_ids
        is_decode = [not row.token_ids for row in plan.rows]
        assert is_decode == sorted(is_decode, reverse=True), "decode rows come first"

    def _check_fences(self, plan: TokenPlan) -> None:
        """No page is written, and no slot taken, that another job's step in flight may use."""
        busy = [entry for entries in self.in_flight.values() for entry in entries]
        busy += [(row.job_id, row.slot, set(self.slots[row.slot].page_ids)) for row in plan.rows]
        for row in plan.rows:
            first, last = row.start, row.start + row.num_tokens - 1
            table = self.slots[row.slot].page_ids
            written = table[first // self.page_size : last // self.page_size + 1]
            for job_id, slot, page_ids in busy:
                if job_id != row.job_id:
                    assert slot != row.slot, "a slot was rebound in flight"
                    assert page_ids.isdisjoint(written), "a page in use is written"

    def _run_row(self, row: TokenRow, step_id: int) -> TokenDelta:
        slot = self.slots[row.slot]
        expected = self.stories.setdefault(row.job_id, ExpectedTokens(self.requests[row.job_id]))
        end = row.start + row.num_tokens
        expected.extend(end)
        token_ids = row.token_ids or (slot.last_token,)
        known = row.num_tokens - row.num_drafts
        right = expected.token_ids[row.start : end]
        if row.job_id not in self.bad_jobs:
            assert list(token_ids[:known]) == right[:known], "wrong input tokens"
            self._check_past(row, expected)
        num_right = next(
            (n for n in range(known, len(right)) if token_ids[n] != right[n]), len(right)
        )
        if self.has_states:
            is_checked = row.job_id not in self.bad_jobs
            is_right = num_right == len(right)
            self.states.go_on(
                row, expected.digests, step_id, is_checked=is_checked, is_right=is_right
            )
        written = [*expected.digests[row.start : row.start + num_right]]
        written += [b"rejected"] * (row.num_tokens - num_right)
        if self.windows is not None and row.job_id not in self.bad_jobs:
            self.windows.go_on(row, written, expected.digests, step_id)
        for position in range(row.start, end):
            page = self.pages[slot.page_ids[position // self.page_size]]
            page.digests[position % self.page_size] = written[position - row.start]
            page.step_ids[position % self.page_size] = step_id
            page.job_id = row.job_id
        self.num_computed_tokens += row.num_tokens
        if row.job_id in self.bad_jobs:
            return TokenDelta(token_ids=(0,) if row.is_sampled else (), is_finite=False)
        scores = self._score_prompt(row)
        if not row.is_sampled:
            return TokenDelta(prompt_logprobs=scores)
        sampled = [expected.sampled_after(row.start + n) for n in range(known, row.num_tokens + 1)]
        sampled[num_right - known + 1 :] = [0] * (row.num_tokens - num_right)  # after a wrong draft
        slot.last_token = sampled[-1]
        has_logprobs = self.requests[row.job_id].sampling.top_logprobs is not None
        return TokenDelta(
            token_ids=tuple(sampled),
            logprobs=tuple(TokenLogprob(n, -0.5) for n in sampled) if has_logprobs else (),
            prompt_logprobs=scores,
        )

    def _check_past(self, row: TokenRow, expected: ExpectedTokens) -> None:
        """Every position before the row's own holds just its past, from a step that is over."""
        table, size = self.slots[row.slot].page_ids, self.page_size
        for first in range(0, row.start, size):
            page = self.pages[table[first // size]]
            num_read = min(size, row.start - first)
            past = expected.digests[first : first + num_read]
            assert page.digests[:num_read] == past, f"{row.job_id} reads another's past"
            is_over = self.in_flight.keys().isdisjoint(page.step_ids[:num_read])
            assert is_over or page.job_id == row.job_id, "a page was found before its commit"

    def _score_prompt(self, row: TokenRow) -> tuple[TokenLogprob, ...]:
        request = self.requests[row.job_id]
        if not request.sampling.prompt_logprobs or not row.token_ids:
            return ()
        end = min(row.start + row.num_tokens, len(request.prompt_ids) - 1)
        targets = request.prompt_ids[row.start + 1 : end + 1]
        return tuple(TokenLogprob(token_id, -1.0) for token_id in targets)


class World(SchedulerDriver):
    """The scheduler of tokens, its pool and the shadow runner."""

    look_s = 0.01
    refusals = (RequestError, Unavailable)

    def __init__(
        self,
        *,
        num_pages: int = 16,
        page_size: int = 4,
        max_length: int = 48,
        depth: int = 1,
        pool: PagePool | None = None,
        num_snapshots: int | None = None,
        window: int = 0,
        num_window_rows: int = 1,
        num_spare_windows: int = 0,
        drafts: Callable[[TokenRequest], StoryDrafts] | None = None,
        draft_pages: int = 0,
        draft_error: float = 0.0,
        draft_reads: bool = False,
        **options: object,
    ) -> None:
        self.options = schedule_of(**options)
        size, most = None, self.options.max_batch_input_tokens
        if window:
            step_tokens = most if self.options.enable_chunked_prefill else max(most, max_length)
            size = WindowSize.least(
                window, page_size, num_rows=num_window_rows, step_tokens=step_tokens
            )
            size = replace(size, num_pages=size.num_pages + num_spare_windows)
        self.pool = pool or PagePool(
            num_pages=num_pages, page_size=page_size, num_snapshots=num_snapshots, windows=size
        )
        self.max_length = max_length
        scheduler = TokenScheduler(
            model=MODEL,
            pool=self.pool,
            options=self.options,
            max_length=max_length,
            namespace=NAMESPACE,
        )
        if drafts is not None:
            scheduler.tokens.drafting.lookup = drafts  # type: ignore[assignment]
        super().__init__(scheduler, None, model=MODEL, depth=depth)
        self.runner = ShadowRunner(
            num_pages=self.pool.num_pages,
            page_size=self.pool.page_size,
            requests=self.requests,
        )
        if draft_pages:
            sizes = draft_pages, self.pool.page_size, VOCAB_SIZE
            scheduler.draft_with(draft_model(*sizes, reads_states=draft_reads))
        self.drafts = (ShadowHead if draft_reads else ShadowDrafts)(
            *(draft_pages, self.pool.page_size, self.requests),
            *(random.Random(num_pages), draft_error),
        )
        if isinstance(self.drafts, ShadowHead):
            self.drafts.target = self.runner
        self.runner.has_states = self.pool.snapshots is not None
        if size is not None:
            self.runner.windows = ShadowWindows(window, size.num_pages, page_size)
        self.cached_since: dict[tuple[int, bytes], int] = {}
        self._pin = self.pool._pin
        self.pool._pin = self._followed  # type: ignore[method-assign]
        self.num_notes = 0

    def _followed(self, page_id: int) -> None:
        """A page that is used between two notes has been free only since it was given back."""
        self._pin(page_id)
        since = self.cached_since.items()
        self.cached_since = {page: note for page, note in since if page[0] != page_id}

    def take(self, proposal: Proposal) -> Plan | None:
        self.note_cached()
        plan = super().take(proposal)
        self._check_evictions()
        return plan

    def launch(self, plan: Plan) -> StepResult:
        if isinstance(plan, DraftPlan):
            return DraftingRunner(self.drafts, self.drafts).launch(plan).result()
        assert isinstance(plan, TokenPlan)
        self._check_plan(plan)
        return self.runner.run(plan)

    def over(self, plan: Plan, outcome: StepResult | TriptychError) -> None:
        if isinstance(plan, DraftPlan):
            return
        assert isinstance(plan, TokenPlan)
        self.runner.finish(plan)
        if isinstance(outcome, TriptychError):
            self.runner.spoil(plan)

    def settled(self, plan: Plan) -> None:
        self.note_cached()

    def check(self) -> None:
        """Check every account."""
        self.scheduler.check()
        self.note_cached()

    def note_cached(self) -> None:
        """Note since when each cached page has been free."""
        self.num_notes += 1
        self.cached_since = {
            (page_id, key): self.cached_since.get((page_id, key), self.num_notes)
            for key, page_id in self.pool._index.items()
            if not self.pool.num_holders(page_id)
        }

    def deltas(self, job_id: str) -> list[TokenDelta]:
        return self.payloads(job_id)

    def output_ids(self, job_id: str) -> tuple[int, ...]:
        """The tokens a job was sent."""
        return tuple(token for delta in self.deltas(job_id) for token in delta.token_ids)

    def check_answer(self, job_id: str) -> None:
        """A job that ran to its end said just what it had to, and said it once."""
        ids, reason = expected_answer(self.requests[job_id], self.max_length)
        last = self.outputs[job_id][-1]
        assert [output.is_final for output in self.outputs[job_id]].index(True) == (
            len(self.outputs[job_id]) - 1
        )
        if last.error is None and last.payload.finish_reason != "cancelled":
            assert (self.output_ids(job_id), last.payload.finish_reason) == (ids, reason)
        else:
            assert self.output_ids(job_id) == ids[: len(self.output_ids(job_id))]

    def finish_all(self) -> None:
        """Run to the end, then expect every answer right and everything given back."""
        self.let_all_go_on()
        for job_id in self.jobs:
            self.check_answer(job_id)
        assert self.pool.num_leased == 0
        stats = self.scheduler.stats()
        assert (stats.num_waiting, stats.num_running) == (0, 0)

    def _check_evictions(self) -> None:
        """Of the cached pages, those used longest ago went first."""
        gone, kept = [0], [self.num_notes]
        for (page_id, key), since in self.cached_since.items():
            if self.pool._index.get(key) != page_id:
                gone.append(since)
            elif not self.pool.num_holders(page_id):
                kept.append(since)
        assert max(gone) <= min(kept), "a page used lately was evicted before an older one"
        self.note_cached()

    def _check_plan(self, plan: TokenPlan) -> None:
        options = self.options
        assert len(plan.rows) <= options.max_batch_size
        if options.enable_chunked_prefill:
            assert plan.num_tokens <= options.max_batch_input_tokens, "the budget is hard"
        partial = [not row.is_sampled for row in plan.rows]
        is_capped = options.long_prefill_token_threshold > 0
        assert is_capped or sum(partial) <= 2, "only a long prompt and the last one are partial"
