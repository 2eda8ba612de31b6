"""How many tokens rows draft, and what they may lose by it."""

from __future__ import annotations

import random

import pytest

from triptych.core.engine_api.plan import StepResult
from triptych.schedulers.cost import CostModel
from triptych.schedulers.tokens.draft_costs import DraftCosts
from triptych.schedulers.tokens.draft_pace import DraftPace
from triptych.schedulers.tokens.state import ScheduledRow


def price(num_rows: int, num_drafts: int) -> float:
    """The first draft costs most, as where more rows need another kernel."""
    return 0.3 + 0.1 * num_drafts


def time_of(part: float, num_tokens: int) -> float:
    """The time of an answer in plain steps, where each token is as drafted with this chance."""
    pace, rng = DraftPace(), random.Random(3)
    time = tokens = 0.0
    while tokens < num_tokens:
        num_drafts = pace.choose(7, 3, 1, price)
        num_accepted = 0
        while num_accepted < num_drafts and rng.random() < part:
            num_accepted += 1
        time += 1 + (price(1, num_drafts) if num_drafts else 0)
        if num_drafts:
            pace.settle(num_drafts, num_accepted)
        pace.go_on(1 + num_accepted)
        tokens += 1 + num_accepted
    return time / tokens


@pytest.mark.parametrize("part", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
def test_drafts_lose_little_however_they_turn_out(part: float) -> None:
    assert time_of(part, 100) < 1.03
    assert time_of(part, 2000) < 1.025


def test_good_drafts_are_long() -> None:
    assert time_of(0.95, 400) < 0.4
    assert time_of(1.0, 400) < 0.3


def test_company_makes_drafts_shorter() -> None:
    """Their time is that of all rows."""
    pace = DraftPace()
    alone = pace.choose(7, 3, 1, lambda num_rows, num_drafts: 0.05 * num_rows * num_drafts)
    assert alone > pace.choose(7, 3, 8, lambda num_rows, num_drafts: 0.05 * num_rows * num_drafts)


def step(costs: DraftCosts, end_s: float, elapsed_s: float, *num_drafts: int) -> None:
    rows = [
        ScheduledRow(None, 0, 1 + num, is_sampled=True, drafts=(0,) * num)  # type: ignore[arg-type]
        for num in num_drafts
    ]
    costs.observe(rows, StepResult(rows=(), elapsed_s=elapsed_s, ended_s=end_s))


def test_a_price_is_the_tokens_of_the_time_that_drafts_take() -> None:
    """The time before a step with drafts, in which it was made, is among it."""
    costs = DraftCosts(CostModel())
    assert costs.price(1, 3) == 0
    now_s = 0.0
    for _ in range(6):
        step(costs, now_s := now_s + 0.1, 0.1, 0)
        step(costs, now_s := now_s + 0.15, 0.14, 3)
        step(costs, now_s := now_s + 0.2, 0.2, 0, 0)
        step(costs, now_s := now_s + 9.3, 0.3, 3, 0)  # the engine was idle before
    assert costs.price(1, 3) == pytest.approx(0.5, abs=0.01)
    assert costs.price(2, 3) == pytest.approx(2 * (0.6 / 0.2 - 1), abs=0.01)
