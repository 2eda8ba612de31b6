"""Drafts in steps: what they may take, and what of them counts."""

import random

from msgspec import structs

from support.token_steps import prompt, step
from support.token_world import StoryDrafts, World, expected_answer, token_request
from triptych.core.engine_api.tokens import TokenRequest


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
    drafter = world.scheduler.tokens.drafter
    num_cached = drafter.pool.num_cached
    drop = structs.replace(token_request(prompt(9), max_tokens=1), cache_action="drop")
    world.submit("c", drop)
    assert drafter.pool.num_cached == num_cached - 2
    world.submit("d", structs.replace(drop, cache_action="clear"))
    assert drafter.pool.num_cached == 0
