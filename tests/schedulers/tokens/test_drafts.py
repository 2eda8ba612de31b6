"""Drafts in steps: what they may take, and what of them counts."""

import random
from dataclasses import replace

from msgspec import structs

from support.token_steps import prompt, step
from support.token_world import StoryDrafts, World, expected_answer, token_request
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.schedulers.shares import ServiceShares


class _LongDrafts(StoryDrafts):
    """The next five tokens, always right."""

    def __init__(self, request: TokenRequest) -> None:
        super().__init__(request, random.Random(0), 0.0)

    def find(self, most: int, *_: object) -> tuple[int, ...]:
        return tuple(self._story.sampled_after(self.num_tokens + n) for n in range(min(most, 5)))


def test_drafts_take_no_page_that_another_row_needs() -> None:
    world = World(num_pages=5, kvcache_ce_watermark=1.0, drafts=_LongDrafts)
    world.submit("old", token_request(prompt(7), max_tokens=6))
    world.submit("new", token_request(prompt(8, 1), max_tokens=2))
    assert step(world) == [("old", 7), ("new", 8)]
    assert step(world) == [("old", 1), ("new", 1)]
    world.finish_all()
    assert world.scheduler.stats().counters["accepted_draft_tokens_total"] > 0


def test_drafts_after_a_stop_token_fill_no_page_of_the_cache() -> None:
    ids, _ = expected_answer(token_request((1, 2, 3), max_tokens=30), 48)
    place = next(n for n in range(3, 20) if n % 6 in (2, 3) and ids.index(ids[n]) == n)
    request = token_request((1, 2, 3), max_tokens=30, stop_token_ids=(ids[place],))
    world = World(page_size=2, drafts=_LongDrafts)
    world.submit("a", request)
    world.finish_all()
    assert world.output_ids("a") == ids[:place]
    assert world.pool.num_cached == (3 + place) // 2


def test_a_dropped_conversation_leaves_no_pages_with_the_drafting_model() -> None:
    world = World(draft_pages=20)
    world.submit("a", token_request(prompt(9), max_tokens=6))
    world.submit("b", token_request(prompt(9, 1), max_tokens=6))
    world.finish_all()
    drafter = world.scheduler.tokens.drafting.drafter
    num_cached = drafter.pool.num_cached
    drop = structs.replace(token_request(prompt(9), max_tokens=1), cache_action="drop")
    world.submit("c", drop)
    assert drafter.pool.num_cached == num_cached - 2
    world.submit("d", structs.replace(drop, cache_action="clear"))
    assert drafter.pool.num_cached == 0


def test_drafts_are_paid_though_no_step_verifies_them() -> None:
    world = World(draft_pages=20)
    world.submit("a", token_request(prompt(9), max_tokens=30))
    drafter = world.scheduler.tokens.drafting.drafter
    drafter.costs.model_price = lambda num_rows, num_drafts: 0.1 * num_drafts
    row = world.scheduler.row_of("a")
    while not row.drafted.is_unpaid:
        step(world)
    credit = row.drafted.pace._credit
    row.drafts = ()  # as where the token budget has no room
    assert step(world) == [("a", 1)]
    assert row.drafted.pace._credit < credit


def test_a_text_is_followed_only_if_the_credit_pays_for_it() -> None:
    world = World(draft_pages=20)
    drafter = world.scheduler.tokens.drafting.drafter
    drafter.costs.follow_price = lambda num_tokens: 0.2 * num_tokens
    world.submit("a", token_request(prompt(9), max_tokens=30))
    world.finish_all()
    assert world.scheduler.stats().counters["draft_tokens_total"] == 0


def test_a_text_that_outgrows_the_drafting_model_gives_its_pages_back() -> None:
    world = World(draft_pages=20)
    drafter = world.scheduler.tokens.drafting.drafter
    drafter._shape = replace(drafter._shape, max_length=20)
    world.submit("a", token_request(prompt(9), max_tokens=30))
    row, held = world.scheduler.row_of("a"), []
    while row.num_known < 30:
        step(world)
        held.append(drafter.pool.num_leased)
    assert max(held) > held[-1] == 0
    world.finish_all()
    assert world.output_ids("a") == expected_answer(row.request, 48)[0]


def test_a_row_goes_on_alone_where_the_drafting_model_finds_nothing_finite() -> None:
    world = World(draft_pages=20)
    request = token_request(prompt(9), max_tokens=12)
    world.submit("a", request)
    world.drafts._run = lambda row: TokenDelta()
    world.finish_all()
    assert world.output_ids("a") == expected_answer(request, 48)[0]
    assert world.scheduler.tokens.drafting.drafter.pool.num_cached == 0


def test_a_prompt_that_is_due_is_not_hidden_behind_a_step_of_drafts() -> None:
    world = World(draft_pages=20)
    world.submit("a", token_request(prompt(9), max_tokens=30))
    row = world.scheduler.row_of("a")
    while not row.awaits_drafts:
        step(world)
    row.last_token_s = 1e6
    world.submit("b", token_request(prompt(9, 1), max_tokens=30))
    proposal = world.scheduler.propose(0.0)
    assert proposal.kind == "draft"
    assert proposal.due_s < 1e5


def test_a_step_of_drafts_is_charged_to_its_clients() -> None:
    world, shares = World(draft_pages=20), ServiceShares()
    world.submit("a", token_request(prompt(9), max_tokens=30))
    row, drafter = world.scheduler.row_of("a"), world.scheduler.tokens.drafting.drafter
    while not row.awaits_drafts:
        step(world)
    chosen = drafter.choose(world.scheduler._state)
    (piece,) = chosen.rows
    drafter.book(chosen, "model", 1, shares)
    assert shares.service_of(row.client) == 0.1 * (piece.num_tokens + piece.num_drafts - 1)
