"""Drafts of rows with grammars: tokens are those of plain decoding, and no draft is disallowed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from msgspec import structs

from support.guided import (
    EOS,
    VOCAB_SIZE,
    GuidedWorld,
    ThinkingRunner,
    allowed_ids,
    guided_request,
    ids_of,
)
from support.shadow_drafts import draft_model
from triptych.core.engine_api.plan import DraftPlan, Plan, StepResult, TokenPlan, TokenRow
from triptych.core.engine_api.tokens import ReasoningRules, TokenDelta, TokenRequest
from triptych.core.errors import OutOfMemory, TriptychError

Answers = dict[str, tuple[list[int], str | None]]
_LIKELY = ids_of('abcd="t0')
(CLOSE,) = ids_of("h")
THINKS = ReasoningRules(opens=(1,), closes=(CLOSE,), ending=(CLOSE,), open_at_start=True)
PATTERN = r"(0|[1-9][0-9]{0,2})(, und so weiter)*"
SCHEMA = {
    "type": "object",
    "properties": {
        "name_of_it": {"type": "string", "maxLength": 4},
        "kind_of_it": {"enum": ["a rather long kind", "another", "a third one"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name_of_it", "kind_of_it", "tags"],
    "additionalProperties": False,
}
KINDS: Sequence[dict[str, object]] = (
    {},
    {"top_logprobs": 0},
    {"min_tokens": 20, "stop_token_ids": (EOS, 40)},
    {"max_tokens": 30},
)


@cache
def requests() -> dict[str, TokenRequest]:
    """Rows with grammars of several kinds, one after reasoning, and one without."""
    schema = json.dumps(SCHEMA)
    found = {
        f"{text[:9]} {n}": guided_request(f"{text[:9]} {n}", text, kind, **sampling)  # type: ignore[arg-type]
        for n, sampling in enumerate(KINDS)
        for kind, text in (("json_schema", schema), ("regex", PATTERN), ("regex", "[a-d]{9}=*"))
    }
    found["free"] = guided_request("free", max_tokens=40)
    thinks = guided_request("thinks", PATTERN, "regex", max_tokens=60)
    found["thinks"] = structs.replace(thinks, reasoning=THINKS)
    found["thinks briefly"] = structs.replace(
        thinks, reasoning=structs.replace(THINKS, max_tokens=3), prompt_ids=tuple(ids_of("brief"))
    )
    return found


class GuessingRunner(ThinkingRunner):
    """Meets no draft that its mask does not have."""

    def _row(self, row: TokenRow) -> TokenDelta:
        for n, draft in enumerate(row.token_ids[len(row.token_ids) - row.num_drafts :]):
            mask = row.allowed_after(n)
            assert not mask or draft in allowed_ids(mask), "a draft that is not allowed"
        return super()._row(row)


class Guesses:
    """Drafts of a job's own answer, wrong with a probability; they may go on after its end."""

    def __init__(self, prompt: Sequence[int], right: Sequence[int], rng: random.Random) -> None:
        self._text, self._rng = [*prompt, *right, EOS, 70, 71], rng
        self.num_tokens = 0

    def take(self, token_ids: Sequence[int], num_rows: int = 1) -> None:
        self.num_tokens += len(token_ids)

    def find(self, most: int, *_: object) -> tuple[int, ...]:
        size = min(most, self._rng.randrange(8))
        found = self._text[self.num_tokens :][: max(0, size)]
        wrong = (*_LIKELY, self._rng.randrange(258))
        return tuple(self._rng.choice(wrong) if self._rng.random() < 0.15 else t for t in found)

    def settle(self, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts

    def cut(self, price: float) -> float:
        return 0.0


def answers(world: GuidedWorld) -> dict[str, tuple[list[int], str | None]]:
    return {name: (world.ids(name), world.reason(name)) for name in world.requests}


@pytest.fixture(scope="module")
def plain() -> Answers:
    world = GuidedWorld()
    world.runner, world.scheduler.tokens.vocab_size = ThinkingRunner(page_size=4), VOCAB_SIZE
    for name, request in requests().items():
        world.submit(name, request)
    world.run()
    return answers(world)


class GuessingWorld(GuidedWorld):
    """Answers are drafted from what they should be, by look-up or by another model."""

    def __init__(self, right: Answers, rng: random.Random, *, drafter: str, **given: Any) -> None:
        super().__init__(**given)
        self.runner = GuessingRunner(page_size=4)
        self._right, self._rng = right, rng
        self._ends: dict[str, int] = {}  # of what the model has computed
        tokens = self.scheduler.tokens
        tokens.vocab_size = VOCAB_SIZE
        if drafter:
            is_head = drafter == "head"
            drafts = draft_model(60, 4, VOCAB_SIZE, max_length=160, reads_states=is_head)
            self.scheduler.draft_with(drafts)
        else:
            tokens.drafting.lookup = lambda request: self._guess(
                next(name for name, each in requests().items() if each == request)
            )

    def _guess(self, name: str) -> Guesses:
        return Guesses(requests()[name].prompt_ids, self._right[name][0], self._rng)

    def launch(self, plan: Plan) -> StepResult | TriptychError:
        if not isinstance(plan, DraftPlan):
            assert isinstance(plan, TokenPlan)
            self._ends |= {row.job_id: row.start + row.num_tokens for row in plan.rows}
            return super().launch(plan)
        lag, rows = int(self.scheduler.tokens.drafting.drafter.reads_states), []
        for row, num_drafts in zip(plan.rows, plan.num_drafts, strict=True):
            end = row.start + row.num_tokens
            assert not lag or end <= self._ends[row.job_id], "states that nothing has computed"
            guess = self._guess(row.job_id)
            guess.take(range(end + lag))  # type: ignore[arg-type]
            found = (*guess.find(num_drafts), *(70,) * num_drafts)
            rows.append(TokenDelta(token_ids=found[:num_drafts]))
        return StepResult(rows=tuple(rows))


@pytest.mark.parametrize("drafter", ["", "model", "head"])
@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_those_without_drafts(plain: Answers, seed: int, drafter: str) -> None:
    """In company, with pages that are too few, and a step that runs out of memory."""
    rng = random.Random(seed)
    sizes: dict[str, Any] = {"num_pages": rng.choice((42, 64, 200)), "depth": rng.choice((1, 2))}
    sizes["num_snapshots"] = rng.choice((None, 12))
    world = GuessingWorld(plain, rng, drafter=drafter, **sizes)
    world.runner.errors = {rng.randrange(4, 40): OutOfMemory("full")}
    for name, request in requests().items():
        world.submit(name, request)
    world.run()
    for name, (ids, reason) in answers(world).items():
        if reason == "out_of_memory":  # it was alone in its step
            assert ids == plain[name][0][: len(ids)]
        else:
            assert (ids, reason) == plain[name], name
    counters = world.scheduler.stats().counters
    assert 0 < counters["accepted_draft_tokens_total"] < counters["draft_tokens_total"]
    assert counters["draft_tokens_total"] > 100
    world.scheduler.check()
