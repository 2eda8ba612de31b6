"""Reasoning that are counted: never more than the budget, whatever else happens to a row."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass

import msgspec
import pytest

from support.guided import (
    EOS,
    VOCAB_SIZE,
    GuidedWorld,
    ThinkingRunner,
    allowed_ids,
    guided_request,
    ids_of,
    text_of,
)
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import ReasoningRules, TokenRequest
from triptych.core.errors import OutOfMemory, UnsupportedOption
from triptych.schedulers.tokens.reasoning import ReasoningCounter

(OPEN, CLOSE, BLANK) = ids_of("{h ")
OPENED = ReasoningRules(opens=(OPEN,), closes=(CLOSE,), ending=(CLOSE,), open_at_start=True)
HARMONY = ReasoningRules(
    opens=tuple(ids_of("[a]")),
    closes=tuple(ids_of(".!")),
    ending=tuple(ids_of(".[f]")),
    reopen=True,
)


def budgeted(rules: ReasoningRules, max_tokens: int | None) -> ReasoningRules:
    return msgspec.structs.replace(rules, max_tokens=max_tokens)


def counter(rules: ReasoningRules) -> ReasoningCounter:
    return ReasoningCounter(rules, TokenRequest(prompt_ids=(1,)), VOCAB_SIZE)


def forced_text(rules: ReasoningRules, text: str) -> str:
    """What becomes of `text` where the counter has a say."""
    reasoning, said = counter(rules), ""
    for token_id in ids_of(text):
        while mask := reasoning.mask():
            (forced,) = allowed_ids(mask)
            reasoning.take([forced])
            said += text_of([forced])
        reasoning.take([token_id])
        said += text_of([token_id])
    return said


@pytest.mark.parametrize(
    ("rules", "budget", "text", "said"),
    [
        (OPENED, 3, "abcdef", "abchdef"),
        (OPENED, 3, "abchef", "abchhef"),
        (OPENED, 3, "abhcdef", "abhcdef"),
        (OPENED, 0, "ab", "hab"),
        (OPENED, None, "abcdef", "abcdef"),
        (HARMONY, 2, "[a]bcd", "[a]bc.[f]d"),
        (HARMONY, 4, "[a]bc.x[a]cde", "[a]bc.x[a]cd.[f]e"),
        (HARMONY, 2, "[a]bc![[a]d", "[a]bc.[f]![[a].[f]d"),
    ],
)
def test_the_end_is_forced_when_the_budget_is_spent(
    rules: ReasoningRules, budget: int | None, text: str, said: str
) -> None:
    assert forced_text(budgeted(rules, budget), text) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{abc", "{ahbc"),
        ("  {abc", "  {ahbc"),
        ("x{abc", "x{abc"),
        ("{hx{abc", "{hx{abc"),
    ],
)
def test_reasoning_that_an_answer_opens_is_at_its_beginning(text: str, said: str) -> None:
    rules = ReasoningRules(
        opens=(OPEN,), closes=(CLOSE,), ending=(CLOSE,), blanks=(BLANK,), max_tokens=1
    )
    assert forced_text(rules, text) == said


def test_nothing_is_prescribed_for_tokens_that_are_free() -> None:
    """Whatever is sampled of them: a row may have been launched that far ahead."""
    draw = random.Random(5)
    for _ in range(400):
        rules = draw.choice([OPENED, HARMONY, msgspec.structs.replace(OPENED, open_at_start=False)])
        reasoning = counter(budgeted(rules, draw.randrange(6)))
        for _ in range(12):
            num_unconstrained = reasoning.num_unconstrained
            for _ in range(min(num_unconstrained, 8)):
                assert not reasoning.mask()
                reasoning.take(ids_of(draw.choice("[a].!hx{")))
            if mask := reasoning.mask():
                reasoning.take(allowed_ids(mask))
    assert counter(OPENED).num_unconstrained == sys.maxsize


@dataclass(frozen=True)
class Case:
    """A request with its budget."""

    name: str
    request: TokenRequest
    budget: int


def cases(num: int, *, form: str = "", **sampling: object) -> list[Case]:
    found = []
    for n in range(num):
        request = guided_request(f"prompt {n % 7}", form, **sampling)
        budget = n % 9
        rules = budgeted(OPENED, budget)
        found.append(Case(f"job{n}", msgspec.structs.replace(request, reasoning=rules), budget))
    return found


def world(**options: object) -> GuidedWorld:
    made = GuidedWorld(**options)  # type: ignore[arg-type]
    made.scheduler.tokens.vocab_size = VOCAB_SIZE  # type: ignore[attr-defined]
    made.runner = ThinkingRunner(page_size=made.pool.page_size)
    return made


def alone(case: Case) -> str:
    text, _ = world(depth=1).answer(case.request)
    return text


@pytest.mark.parametrize("sampling", [{}, {"top_logprobs": 0}, {"repetition_penalty": 1.2}])
def test_rows_keep_their_budget_with_each_other(sampling: dict[str, object]) -> None:
    asked = cases(18, max_tokens=24, **sampling)
    together = world(max_batch_size=6)
    for case in asked:
        together.submit(case.name, case.request)
    together.run()
    spent = set()
    for case in asked:
        text = together.text(case.name)
        reasoning, end, _ = text.partition("h")
        assert len(text) == 24
        assert end
        assert len(reasoning) <= case.budget
        spent.add(len(reasoning) == case.budget)
        assert text == alone(case)
    assert spent == {True, False}
    together.scheduler.check()


def test_rows_that_give_way_keep_their_budget() -> None:
    asked = cases(8, max_tokens=40)
    tight = world(num_pages=24, max_batch_size=8)
    for case in asked:
        tight.submit(case.name, case.request)
    tight.run()
    assert tight.scheduler.stats().counters["preemptions_total"] > 0
    assert [tight.text(case.name) for case in asked] == [alone(case) for case in asked]


def test_steps_that_fail_are_tried_again_within_the_budget() -> None:
    asked = cases(6, max_tokens=20)
    faulty = world(max_batch_size=6)
    faulty.runner.errors = {n: OutOfMemory("No room.") for n in (3, 10, 17)}
    for case in asked:
        faulty.submit(case.name, case.request)
    faulty.run()
    assert [faulty.text(case.name) for case in asked] == [alone(case) for case in asked]


def test_a_form_begins_where_reasoning_ends() -> None:
    pattern = r"[0-9]{3}, is it not\?"
    asked = cases(9, form=pattern)
    together = world(max_batch_size=4)
    for case in asked:
        together.submit(case.name, case.request)
    together.run()
    for case in asked:
        reasoning, _, form = together.text(case.name).partition("h")
        assert len(reasoning) <= case.budget
        assert re.fullmatch(pattern, form)
        assert together.reason(case.name) == "stop"
        assert together.text(case.name) == alone(case)


def test_reasoning_without_an_end_has_no_form() -> None:
    (case,) = cases(1, form="[0-9]{3}", max_tokens=5)
    request = msgspec.structs.replace(case.request, reasoning=budgeted(OPENED, 5))
    made = world()
    made.runner.sample = lambda row, context: ids_of("a")[0]  # type: ignore[method-assign]
    assert made.answer(request) == ("aaaaa", "length")


def test_a_model_without_masks_refuses() -> None:
    (case,) = cases(1)
    made = world()
    made.scheduler.grammar_worker = None  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedOption):
        made.submit("job", case.request)


def test_a_token_that_ends_reasoning_may_be_one_that_ends_an_answer() -> None:
    """Under a form it ends the reasoning alone: it must be there to be sampled."""
    sampling = SamplingParams(stop_token_ids=(EOS, CLOSE))
    request = TokenRequest(prompt_ids=(1,), grammar="form", sampling=sampling)
    reasoning = ReasoningCounter(OPENED, request, VOCAB_SIZE)
    allowed = set(allowed_ids(reasoning.mask()))
    assert CLOSE in allowed
    assert EOS not in allowed
    reasoning.take([CLOSE])
    assert not reasoning.is_open


def test_an_ending_that_is_a_stop_token_is_followed_by_the_answer() -> None:
    """And a runner that holds stop tokens off for a while can sample it."""
    request = guided_request("prompt", max_tokens=8, min_tokens=6, stop_token_ids=(EOS, CLOSE))
    request = msgspec.structs.replace(request, reasoning=budgeted(OPENED, 3))
    made = world()
    made.runner.sample = lambda row, context: (  # type: ignore[method-assign]
        allowed_ids(row.allowed)[0] if row.allowed else ids_of("a")[0]
    )
    assert made.answer(request) == ("aaahaaaa", "length")
    (held,) = {row.sampling.stop_token_ids for plan in made.runner.plans for row in plan.starts}
    assert held == (EOS,)


def test_a_stop_token_that_is_not_prescribed_ends_the_answer() -> None:
    request = guided_request("prompt", max_tokens=8, stop_token_ids=(EOS, CLOSE))
    request = msgspec.structs.replace(request, reasoning=budgeted(OPENED, 3))
    made = world()
    made.runner.sample = lambda row, context: CLOSE  # type: ignore[method-assign]
    assert made.answer(request) == ("", "stop")


def test_drafts_of_reasoning_end_with_it() -> None:
    """Under a form: after the end another mask applies, which no draft may pass."""
    request = TokenRequest(
        prompt_ids=(1,), grammar="form", sampling=SamplingParams(stop_token_ids=(EOS,))
    )
    reasoning = ReasoningCounter(budgeted(OPENED, 5), request, VOCAB_SIZE)
    reasoning.is_relaxed = True
    a, drafts = ids_of("a")[0], (*ids_of("ab"), CLOSE, *ids_of("c"))
    assert (reasoning.num_draftable, counter(OPENED).num_draftable) == (5, sys.maxsize)
    assert reasoning.cut(drafts) == drafts[:2]
    assert reasoning.cut((a, EOS, a)) == (a,)
    assert counter(OPENED).cut(drafts) == drafts
    assert (reasoning.num_relaxed(drafts), counter(OPENED).num_relaxed(drafts)) == (2, 0)
    assert reasoning.num_relaxed((a, EOS, a)) == 1, "an end is sampled"
    reasoning.take([CLOSE])
    assert reasoning.num_relaxed(drafts) == 0
