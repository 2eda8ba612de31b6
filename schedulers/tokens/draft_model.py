"""Drafts by a smaller model or a head: its pages, its steps, and when they pay.

Owns the pages of that model, how far it has followed each row, and the choice of its steps. A row
asks for drafts when the value of its last token is known, and takes no step before it has them; the
model then computes what it has not seen of the row's tokens, and samples the next ones with the
random numbers of their positions. So where both models agree they draw the same token. Drafts are
verified as all others are and never change a token. Knows no tensors.

A head (`core.runtime.decoders.heads.protocol`) reads the larger model's hidden states, which lie in
that one's pages. Its cell q is of token q + 1, and of the states at q: a page's content follows
from one more token than the page has positions, so it is shared by the key of the next page. Cells
of its own drafts are made of its own states, and are computed again once the tokens are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from msgspec import structs

from triptych.core.engine_api.frames import FIRST_FRAME_ID
from triptych.core.engine_api.plan import DraftPlan, StepResult, TokenRow
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta
from triptych.core.kv.pages import PagePool
from triptych.schedulers.shares import ServiceShares
from triptych.schedulers.tokens.draft_costs import DraftCosts
from triptych.schedulers.tokens.draft_pace import DraftPace
from triptych.schedulers.tokens.drafted_row import DraftedRow
from triptych.schedulers.tokens.state import SequenceState, TokenState
from triptych.schedulers.tokens.step import TokenStep

MAX_TOKENS = 512
"""Tokens of a step that follows long texts: rows of other requests wait for it."""
_EXPECTED, _TRUST, _KEPT = 0.6, 10.0, 0.995
"""The part of drafts that is accepted before any was, the drafts whose weight that has, and what is
kept of what was learned with each draft."""
_MAX_LAG_PART, _MOST_LEFT = 0.1, 512
"""A row whose text is new to the model is followed if that takes the time of so many of the tokens
that it may still yield, of which no more than the second number count, and it can pay."""


@dataclass(slots=True, eq=False)
class DraftPiece:
    """A row's part of a step of the drafting model: tokens that it follows, and drafts."""

    unit: SequenceState
    start: int
    num_tokens: int
    num_drafts: int
    stage: str = "draft"
    is_sampled: bool = False
    is_stale: bool = False
    saves: tuple[tuple[int, int], ...] = ()
    restored: int = -1


@dataclass(slots=True, kw_only=True)
class DraftStep(TokenStep):
    """A step of the drafting model."""

    kind: str = "draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """The drafting model: its vocabulary and that of the other model, context, relative size.

    Drafts have `max_drafts` tokens at most. A head `reads_states` of the other model. One that
    `drafts_blocks` needs cells for the last known token and for each draft.
    """

    vocab_size: int
    target_vocab_size: int
    max_length: int
    relative_size: float
    max_drafts: int
    reads_states: bool = False
    drafts_blocks: bool = False

    @property
    def lag(self) -> int:
        """By how many positions a token's cell is before its own."""
        return int(self.reads_states)

    def num_cells(self, num_known: int, num_drafts: int) -> int:
        """The cells of a text of so many tokens, and of drafts, whose last one may need none."""
        return num_known - self.lag + num_drafts + (1 if self.drafts_blocks else -1)


class DraftModel:
    """The drafting model of one token model. `pool` are its own pages, of the same size."""

    def __init__(self, pool: PagePool, shape: DraftShape) -> None:
        self.pool = pool
        self.costs = DraftCosts(shape.relative_size)
        self.yields = False
        """Whether a step of the other model comes first: rows are far behind."""
        self._shape = shape
        self._accepted, self._tried = _EXPECTED * _TRUST, _TRUST

    @property
    def reads_states(self) -> bool:
        """Whether it reads the larger model's states, and so drafts after computed tokens alone."""
        return self._shape.reads_states

    # Rows.

    def open(self) -> DraftedRow:
        """The record of a new row."""
        return DraftedRow(DraftPace([self._accepted / self._tried]))

    def settle(self, row: SequenceState, num_drafts: int, num_accepted: int) -> None:
        """Learn how many of a row's last drafts were right."""
        assert row.drafted is not None, "its drafts were verified"
        row.drafted.pace.settle(num_drafts, num_accepted)
        row.drafted.is_unpaid = False
        num_tried = min(num_drafts, num_accepted + 1)
        kept = _KEPT**num_tried
        self._accepted = kept * self._accepted + num_accepted
        self._tried = kept * self._tried + num_tried

    def want(self, row: SequenceState, most: int, num_rows: int, room: float = math.inf) -> None:
        """Let a row await its next drafts, `most` at most, if they are worth their time.

        `num_rows` share its steps, which may take `room` longer, in plain steps. Takes the pages
        that the drafts need. A row with tokens in flight takes no step before they are known, and
        asks again.
        """
        drafted, shape = row.drafted, self._shape
        assert drafted is not None, "a row that drafts"
        if drafted.is_unpaid:  # no step had room for them, or the row gave way
            drafted.pace.settle(0, 0)
            drafted.is_unpaid = False
        num_left = shape.max_length - row.num_known
        if num_left <= 0:  # its pages are of use to others
            self.release(row)
        most, num_drafts = min(most, shape.max_drafts, num_left), 0
        if most > 0 and self.costs.is_known:
            num_drafts = drafted.pace.choose(most, 0, num_rows, self.costs.model_price, room)
        drafted.is_due = bool(num_drafts and row.num_unknown)
        if num_drafts and not row.num_unknown and self._follow(row, drafted):
            self._take_pages(row, drafted, num_drafts)

    def _follow(self, row: SequenceState, drafted: DraftedRow) -> bool:
        """Find out how much of a row's text the model has seen; false if it cannot follow it."""
        if drafted.lease is None and not self._begin(row, drafted):
            return False
        first, end = drafted.num_computed, row.num_known
        guesses = () if self.reads_states else drafted.guesses
        pairs = zip(guesses, row.token_ids(first, end - 1), strict=False)
        drafted.num_computed += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        drafted.guesses = ()
        token_ids = row.token_ids(drafted.num_computed, end)
        most = max((each for each in token_ids if each < FIRST_FRAME_ID), default=0)
        if most < self._shape.vocab_size:
            return True
        self.release(row)
        return False

    def _begin(self, row: SequenceState, drafted: DraftedRow) -> bool:
        """Begin a row after its cached pages; false if it is too far ahead."""
        page_size = self.pool.page_size
        keys = self._keys(row, row.num_known - 1)
        num_cached = len(self.pool.peek(keys)) * page_size + self._shape.lag
        num_left = min(row.max_outputs - len(row.output_ids), _MOST_LEFT)
        price = self.costs.follow_price(row.num_known - num_cached)
        if price > _MAX_LAG_PART * num_left or not drafted.pace.pay(price):
            return False
        drafted.lease = self.pool.acquire(keys)
        drafted.num_computed = len(drafted.lease) * page_size + self._shape.lag
        return True

    def _keys(self, row: SequenceState, num_tokens: int) -> Sequence[bytes]:
        """The keys of pages whose content follows from the first tokens of a row."""
        if not self.pool.enable_prefix_caching:
            return ()
        num_pages = num_tokens // self.pool.page_size
        row.extend_keys(num_pages, self.pool.page_size)
        return row.keys[self._shape.lag : num_pages]

    def _take_pages(self, row: SequenceState, drafted: DraftedRow, num_drafts: int) -> None:
        """Await as many drafts as there are pages for."""
        lease, shape = drafted.lease, self._shape
        assert lease is not None, "the row is followed"
        most = (len(lease) + self.pool.num_available) * self.pool.page_size
        num_drafts -= max(0, shape.num_cells(row.num_known, num_drafts) - most)
        if num_drafts < 1:
            self.release(row)
            return
        num_pages = self.pool.num_pages_for(shape.num_cells(row.num_known, num_drafts))
        self.pool.extend(lease, max(0, num_pages - len(lease)))
        drafted.num_wanted = num_drafts

    def release(self, row: SequenceState) -> None:
        """Take back a row's pages and slot: it ended, gave way, or failed here."""
        drafted = row.drafted
        if drafted is None:
            return
        if drafted.lease is not None:
            self.pool.release(drafted.lease)
        drafted.lease, drafted.is_bound, drafted.num_bound_pages = None, False, 0
        drafted.num_wanted = drafted.num_computed = 0
        drafted.is_due = False
        drafted.guesses = ()

    def give_up(self, row: SequenceState) -> None:
        """Go on without drafts of a row, after a step that failed."""
        self.release(row)
        row.drafted = None

    # Steps.

    def choose(self, state: TokenState) -> DraftStep | None:
        """The step for rows that await drafts, in order. Changes nothing."""
        step, num_left = DraftStep(), MAX_TOKENS
        for row in state.running:
            drafted = row.drafted
            if drafted is None or not drafted.num_wanted or row.is_paused or not num_left:
                continue
            num_tokens = min(row.num_known - drafted.num_computed, num_left)
            is_whole = drafted.num_computed + num_tokens == row.num_known
            num_drafts = drafted.num_wanted if is_whole else 0
            step.rows.append(DraftPiece(row, drafted.num_computed, num_tokens, num_drafts))
            num_left -= num_tokens
        step.work = {
            "draft_rows": len(step.rows),
            "draft_tokens": MAX_TOKENS - num_left,
            "drafts": max((piece.num_drafts for piece in step.rows), default=0),
        }
        return step if step.rows else None

    def book(self, step: DraftStep, model: str, step_id: int, shares: ServiceShares) -> DraftPlan:
        """The plan of a chosen step, whose clients are charged."""
        for piece in step.rows:
            num_computed = piece.num_tokens + max(0, piece.num_drafts - 1)
            shares.charge(piece.unit.client, self._shape.relative_size * num_computed)
        return DraftPlan(
            step_id=step_id,
            model=model,
            kind=step.kind,
            rows=tuple([self._book(piece) for piece in step.rows]),
            num_drafts=tuple([piece.num_drafts for piece in step.rows]),
        )

    def _book(self, piece: DraftPiece) -> TokenRow:
        row, drafted = piece.unit, piece.unit.drafted
        assert drafted is not None, "the row awaits drafts"
        assert drafted.lease is not None, "the row is followed"
        page_ids = drafted.lease.page_ids
        planned = TokenRow(
            job_id=row.name,
            slot=row.slot,
            start=piece.start - self._shape.lag,
            num_tokens=piece.num_tokens,
            token_ids=row.token_ids(piece.start, piece.start + piece.num_tokens),
            new_page_ids=tuple(page_ids[drafted.num_bound_pages :]),
            is_sampled=piece.num_drafts > 0,
        )
        if not drafted.is_bound:
            planned = structs.replace(planned, sampling=_own_sampling(row.request.sampling))
        drafted.is_bound, drafted.num_bound_pages = True, len(page_ids)
        return planned

    def accept(self, piece: DraftPiece, result: TokenDelta) -> None:
        """Record what a step computed of a row that has not ended."""
        row, drafted = piece.unit, piece.unit.drafted
        assert drafted is not None, "the row awaits drafts"
        assert drafted.lease is not None, "its pages are held while it is in flight"
        if piece.num_drafts and not result.token_ids:  # nothing finite
            self.pool.unpublish(drafted.lease, row.keys[self._shape.lag :])
            self.give_up(row)
            return
        drafted.num_computed = piece.start + piece.num_tokens
        if keys := self._keys(row, drafted.num_computed)[drafted.lease.num_published :]:
            self.pool.publish(drafted.lease, keys)
        if not piece.num_drafts:
            self.yields = True
            return
        drafted.guesses = result.token_ids[: piece.num_drafts - 1]
        drafted.num_wanted, drafted.is_unpaid = 0, True
        most = self._shape.target_vocab_size
        row.drafts = tuple(takewhile(lambda token_id: token_id < most, result.token_ids))

    def learn(self, step: DraftStep, num_rows: int, result: StepResult) -> None:
        """Learn the price of a step while `num_rows` share those of the other model."""
        num_tokens = sum(piece.num_tokens for piece in step.rows)
        drafts = [piece.num_drafts for piece in step.rows if piece.num_drafts]
        self.costs.observe_model(num_rows, num_tokens, drafts, result)

    def check(self, state: TokenState) -> None:
        """Assert that every page has its owner."""
        self.pool.check()
        holders = [row for row in (*state.running, *state.leaving) if row.drafted is not None]
        leases = {row.drafted.lease for row in holders if row.drafted is not None} - {None}
        assert len(leases) == self.pool.num_leases, "a lease of the drafting model is lost"


def _own_sampling(sampling: SamplingParams) -> SamplingParams:
    """The parameters of a row that follow from nothing but its next token's probabilities."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        sample_index=sampling.sample_index,
    )
