"""How many tokens rows draft, and what they may lose by it."""

from __future__ import annotations

import math
import random

import pytest

from triptych.core.engine_api.plan import StepResult
from triptych.schedulers.tokens.draft_costs import DraftCosts
from triptych.schedulers.tokens.draft_pace import MARGIN, DraftPace
from triptych.schedulers.tokens.scheduled_row import ScheduledRow


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


@pytest.mark.parametrize("seed", range(30))
def test_no_pattern_of_accepted_drafts_loses_more_than_the_credit(seed: int) -> None:
    """After each step, with prices that are as far above the expected ones as is paid."""
    rng, pace, num_tokens, loss = random.Random(seed), DraftPace(), 0, 0.0
    slope, part = rng.choice((0.02, 0.1, 0.3)), 0.0
    for turn in range(600):
        part = rng.choice((0.0, 0.3, 0.7, 1.0)) if turn % 20 == 0 else part

        def guessed(num_rows: int, num_drafts: int) -> float:
            return slope * (1 + num_drafts)

        num_drafts = pace.choose(7, rng.randrange(1, 9), 1, guessed)
        num_accepted = 0
        while num_accepted < num_drafts and rng.random() < part:
            num_accepted += 1
        if num_drafts:
            pace.settle(num_drafts, num_accepted)
            loss += MARGIN * guessed(1, num_drafts) - num_accepted
        pace.go_on(1 + num_accepted)
        num_tokens += 1 + num_accepted
        assert loss <= 0.75 + 0.015 * num_tokens + 1e-9


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


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_price_is_the_tokens_of_the_time_that_drafts_take(is_busy: bool) -> None:
    """Also on a machine that is now fast and now slow; waits of the host are among it."""
    costs, now_s, rng = DraftCosts(), 0.0, random.Random(1)
    for turn in range(400):
        num_drafts = rng.randrange(1, 6)
        speed = 1.0 + is_busy * (turn // 40 % 2)
        for num_rows, drafts_s in ((1, 0.02 + 0.01 * num_drafts), (8, 0.03 * num_drafts)):
            for added in (0.0, drafts_s):
                elapsed_s = speed * (0.1 + added) * rng.uniform(0.9, 1.1)
                wait_s = 0.005 * speed if added else 0.0
                now_s += wait_s + elapsed_s
                drafts = (num_drafts,) if added else (0,)
                step(costs, now_s, elapsed_s, *drafts, *[0] * (num_rows - 1))
    assert costs.price(1, 3) == pytest.approx(0.6, abs=0.15)
    assert costs.price(1, 1) < costs.price(1, 3) < costs.price(1, 5)
    assert costs.price(8, 2) == pytest.approx(8 * (0.6 + 0.1), abs=1.0)


def test_a_line_without_slope_is_flat_and_low() -> None:
    costs, now_s = DraftCosts(), 0.0
    for num_drafts, elapsed_s in [(0, 0.1), (5, 0.12), (1, 0.14)] * 60:
        now_s += elapsed_s
        step(costs, now_s, elapsed_s, num_drafts)
    assert costs.price(1, 1) == costs.price(1, 7) == pytest.approx(0.22, abs=0.03)


def test_a_first_step_that_pages_in_is_soon_forgotten() -> None:
    costs, now_s = DraftCosts(), 0.0
    for num_drafts, elapsed_s in [(0, 9.0), (0, 0.1), *[(2, 0.15)] * 40]:
        now_s += elapsed_s
        step(costs, now_s, elapsed_s, num_drafts)
    assert costs.price(1, 2) == pytest.approx(0.5, abs=0.05)


def test_the_steps_of_other_models_are_not_paid() -> None:
    """They lie between all steps, those without drafts as well."""
    costs, now_s = DraftCosts(), 0.0
    for num_drafts, elapsed_s in [(0, 0.1), (2, 0.12)] * 60:
        now_s += 0.3 + elapsed_s
        step(costs, now_s, elapsed_s, num_drafts)
    assert costs.price(1, 2) == pytest.approx(0.2, abs=0.05)


def test_prompts_teach_nothing() -> None:
    costs = DraftCosts()
    before = costs.price(1, 3)
    prompt = ScheduledRow(None, 0, 40, is_sampled=True)  # type: ignore[arg-type]
    costs.observe([prompt], StepResult(rows=(), elapsed_s=9.0, ended_s=9.0))
    assert costs.price(1, 3) == before


def test_other_work_on_the_machine_changes_no_price() -> None:
    """It makes every second step up to three times as long, with drafts and without."""
    costs, rng, now_s = DraftCosts(), random.Random(2), 0.0
    for number in range(400):
        num_drafts = (0, 3, 0, 7)[number % 4]
        elapsed_s = (0.02 + 0.003 * num_drafts) * (1 + 2 * rng.random() * (rng.random() < 0.5))
        now_s += elapsed_s
        step(costs, now_s, elapsed_s, num_drafts)
    assert costs.price(1, 3) == pytest.approx(0.45, abs=0.2)
    assert costs.price(1, 7) == pytest.approx(1.05, abs=0.25)


def test_drafts_of_a_model_cost_its_time_too() -> None:
    costs, now_s = DraftCosts(0.2), 0.0
    assert not costs.is_known
    for _ in range(60):
        for elapsed_s, num_drafts in ((0.1, 0), (0.12, 3)):
            if num_drafts:
                now_s += 0.05
                costs.observe_model(1, 2, [3], StepResult(elapsed_s=0.05, ended_s=now_s))
            now_s += elapsed_s
            step(costs, now_s, elapsed_s, num_drafts)
    assert costs.is_known
    assert costs.price(1, 3) == pytest.approx(0.2, abs=0.05)
    assert costs.model_price(1, 3) == pytest.approx(0.7, abs=0.1)
    long = StepResult(elapsed_s=1.0, ended_s=now_s + 1.0)
    for _ in range(60):
        costs.observe_model(1, 100, [], long)
    assert costs.follow_price(100) == pytest.approx(10.0, abs=0.5)


def test_the_price_of_a_text_follows_from_prompts_before_it_was_measured() -> None:
    costs = DraftCosts(0.5)
    step(costs, 0.1, 0.1, 0)
    assert costs.follow_price(100) == pytest.approx(100 * 0.5 * 0.2)
    prompt = ScheduledRow(None, 0, 1000, is_sampled=True)  # type: ignore[arg-type]
    costs.observe([prompt], StepResult(elapsed_s=0.2, ended_s=0.3))
    assert costs.follow_price(100) == pytest.approx(0.5 * 0.2)


def test_drafts_lose_little_on_a_machine_that_is_quiet_again() -> None:
    """Steps without drafts were measured while it was busy; few drafts are right."""
    costs, rng, now_s = DraftCosts(), random.Random(1), 0.0
    for slowness in (2.0, 1.1):
        pace, time, num_tokens = DraftPace(), 0.0, 0
        while num_tokens < 200:
            num_drafts = pace.choose(7, 3, 1, costs.price)
            num_accepted = 0
            while num_accepted < num_drafts and rng.random() < 0.2:
                num_accepted += 1
            time += 1 + 0.2 * num_drafts
            now_s += slowness * (0.02 + 0.004 * num_drafts)
            step(costs, now_s, slowness * (0.02 + 0.004 * num_drafts), num_drafts)
            if num_drafts:
                pace.settle(num_drafts, num_accepted)
            pace.go_on(1 + num_accepted)
            num_tokens += 1 + num_accepted
        assert time < 1.03 * num_tokens


def test_a_step_without_drafts_is_due_after_many_with() -> None:
    costs, now_s = DraftCosts(), 0.0
    for number, num_drafts in enumerate((0, *[2] * 60)):
        now_s += 0.1
        step(costs, now_s, 0.1, num_drafts)
        assert math.isinf(costs.price(1, 1)) == (number >= 48)
    step(costs, now_s + 0.1, 0.1, 0)
    assert costs.price(1, 1) < 1


def test_a_price_too_high_to_draft_is_forgotten() -> None:
    costs, now_s = DraftCosts(), 0.0
    for _ in range(40):
        for elapsed_s, num_drafts in ((0.1, 0), (0.4, 2)):
            now_s += elapsed_s
            step(costs, now_s, elapsed_s, num_drafts)
    assert costs.price(1, 2) > 1.5
    for _ in range(3000):
        now_s += 0.1
        step(costs, now_s, 0.1, 0)
    assert costs.price(1, 2) < 0.6


def test_a_price_that_grows_with_the_rows_is_soon_known() -> None:
    """The first guess is that of one row: it is as far below as a step has more rows."""
    costs, now_s = DraftCosts(), 0.0
    for elapsed_s, num_drafts in [(0.1, 0), (0.116, 1)] * 3:
        now_s += elapsed_s
        step(costs, now_s, elapsed_s, num_drafts, *[0] * 7)
    assert costs.price(8, 1) == pytest.approx(8 * 0.16, abs=0.4)
