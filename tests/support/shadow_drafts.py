"""A drafting model that computes nothing but knows what every one of its pages should hold."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.shadow_story import ExpectedTokens
from triptych.core.engine_api.plan import Plan, StepResult, TokenPlan, TokenRow
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.kv.pages import PagePool
from triptych.schedulers.tokens.draft_costs import DraftCosts
from triptych.schedulers.tokens.draft_model import DraftModel, DraftShape


class FreeDrafts(DraftCosts):
    """Drafts always pay."""

    is_known = True  # type: ignore[assignment]

    def model_price(self, num_rows: int, num_drafts: int) -> float:
        return 0.0

    def follow_price(self, num_tokens: int) -> float:
        return 0.0


def draft_model(num_pages: int, page_size: int, vocab_size: int, **shape: int) -> DraftModel:
    """A drafting model whose drafts always pay."""
    sizes = {"max_length": 48, "max_drafts": 4, **shape}
    drafter = DraftModel(
        PagePool(num_pages=num_pages, page_size=page_size),
        DraftShape(vocab_size=vocab_size, target_vocab_size=vocab_size, relative_size=0.1, **sizes),
    )
    drafter.costs = FreeDrafts()
    return drafter


@dataclass
class _Slot:
    job_id: str = ""
    page_ids: list[int] = field(default_factory=list)
    last_token: int = -1


@dataclass
class _Done:
    rows: tuple[TokenDelta, ...]

    def result(self) -> StepResult:
        return StepResult(rows=self.rows)


class ShadowDrafts:
    """Implements `Runner`: guesses the next token of a job's story, wrong with a probability."""

    lag = 0

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        requests: Mapping[str, TokenRequest],
        rng: random.Random,
        error: float,
    ) -> None:
        self._pages = [[b""] * page_size for _ in range(num_pages)]
        self._size, self._requests, self._rng, self._error = page_size, requests, rng, error
        self._slots: dict[int, _Slot] = {}

    def launch(self, plan: Plan) -> _Done:
        assert isinstance(plan, TokenPlan)
        return _Done(tuple(self._run(row) for row in plan.rows))

    def close(self) -> None:
        pass

    def _run(self, row: TokenRow) -> TokenDelta:
        if row.sampling is not None:
            self._slots[row.slot] = _Slot(row.job_id)
        slot = self._slots[row.slot]
        assert slot.job_id == row.job_id, "the slot is another job's"
        slot.page_ids += row.new_page_ids
        first, end = row.start + self.lag, row.start + self.lag + row.num_tokens
        story = ExpectedTokens(self._requests[row.job_id])
        story.extend(end)
        if row.token_ids:
            assert list(row.token_ids) == story.token_ids[first:end], "wrong tokens"
            held = [self._at(slot, cell) for cell in range(row.start)]
            assert held == [_mark(each) for each in story.digests[self.lag : first]], "a wrong past"
            self._check_states(row, story)
        token_ids = row.token_ids or (slot.last_token,)
        for cell, token_id in enumerate(token_ids, row.start):
            is_right = token_id == story.token_ids[cell + self.lag]
            is_right = is_right and bool(row.token_ids or not self.lag)
            mark = _mark(story.digests[cell + self.lag]) if is_right else b"wrong"
            self._pages[slot.page_ids[cell // self._size]][cell % self._size] = mark
        if not row.is_sampled:
            return TokenDelta()
        is_wrong = self._rng.random() < self._error
        slot.last_token = (story.sampled_after(end) + is_wrong) % 50
        return TokenDelta(token_ids=(slot.last_token,))

    def _check_states(self, row: TokenRow, story: ExpectedTokens) -> None:
        """A smaller model reads no states."""

    def _at(self, slot: _Slot, cell: int) -> bytes:
        return self._pages[slot.page_ids[cell // self._size]][cell % self._size]


class ShadowHead(ShadowDrafts):
    """A head: cell q is of token q + 1 and of what the target's page holds at q.

    Cells of its own drafts are of its own states, and so wrong.
    """

    lag = 1
    target: Any

    def _check_states(self, row: TokenRow, story: ExpectedTokens) -> None:
        table, size = self.target.slots[row.slot].page_ids, self._size
        for cell in range(row.start, row.start + row.num_tokens):
            page = self.target.pages[table[cell // size]]
            assert page.digests[cell % size] == story.digests[cell], "states of another text"


def _mark(digest: bytes) -> bytes:
    return hashlib.blake2b(digest, digest_size=4).digest()


Make = Callable[[Mapping[str, TokenRequest]], ShadowDrafts]
