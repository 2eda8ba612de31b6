"""Equal beginnings are computed once: found in the cache, or waited for."""

import pytest

from support.token_steps import prompt, step
from support.token_world import World, token_request


def test_a_hit_recomputes_the_last_token_and_at_most_a_page() -> None:
    for length in (4, 5, 7, 8, 9, 12):
        world = World()
        for name in ("cold", "warm"):
            world.submit(name, token_request(prompt(length), max_tokens=1))
            before = world.runner.num_computed_tokens
            world.run()
        computed = world.runner.num_computed_tokens - before
        assert 1 <= computed <= world.pool.page_size
        assert world.deltas("warm")[0].num_cached_tokens == length - computed
        world.finish_all()


def test_answers_are_cached_for_the_next_turn_of_a_talk() -> None:
    world = World()
    world.submit("one", token_request(prompt(6), max_tokens=7))
    world.finish_all()
    talk = (*prompt(6), *world.output_ids("one"), 1)
    world.submit("two", token_request(talk, max_tokens=1))
    world.finish_all()
    assert world.deltas("two")[0].num_cached_tokens == 12


def test_tenants_share_nothing() -> None:
    world = World()
    for index, owner in enumerate(({}, {"tenant": "x"}, {"tenant": "y"}, {"tenant": "x"})):
        world.submit(f"{index}", token_request(prompt(9), max_tokens=1, **owner))
        world.run()
    assert [world.deltas(f"{i}")[0].num_cached_tokens for i in range(4)] == [0, 0, 0, 8]


@pytest.mark.parametrize("depth", [1, 2])
def test_of_equal_prompts_the_shared_pages_are_computed_once(depth: int) -> None:
    world = World(num_pages=80, max_batch_input_tokens=8, depth=depth, max_batch_size=16)
    for index in range(16):
        world.submit(f"{index}", token_request((*prompt(32), index), max_tokens=1))
    world.finish_all()
    assert world.runner.num_computed_tokens == 32 + 16
    assert [world.deltas(f"{i}")[0].num_cached_tokens for i in range(16)] == [0] + [32] * 15


def test_others_pass_those_that_wait_for_a_page() -> None:
    world = World(num_pages=40, max_batch_input_tokens=16)
    world.submit("a", token_request((*prompt(10), 1), max_tokens=1))
    world.submit("b", token_request((*prompt(10), 2), max_tokens=1))
    world.submit("c", token_request(prompt(5, 9), max_tokens=1))
    assert step(world) == [("a", 11), ("c", 5)]
    assert step(world) == [("b", 3)]


def test_only_what_is_shared_is_waited_for() -> None:
    world = World(num_pages=40, max_batch_input_tokens=8)
    world.submit("long", token_request(prompt(32), max_tokens=1))
    world.submit("short", token_request((*prompt(8), 99), max_tokens=1))
    step(world)
    assert len(world.deltas("short")) == 0
    assert step(world) == [("long", 7), ("short", 1)]


@pytest.mark.parametrize("end", ["cancel", "pause", "bad"])
def test_a_waiting_row_goes_on_when_the_computing_row_does_not(end: str) -> None:
    world = World(num_pages=40, max_batch_input_tokens=8)
    world.submit("a", token_request(prompt(32), max_tokens=1))
    world.submit("b", token_request((*prompt(31), 1), max_tokens=1))
    step(world)
    if end == "cancel":
        world.scheduler.cancel("a")
    elif end == "pause":
        world.scheduler.set_paused("a", True)
    else:
        world.runner.bad_jobs.add("a")
        step(world)
    assert step(world)[0][0] == "b"
    world.finish_all()


def test_a_waiting_row_goes_on_when_the_computing_row_is_preempted() -> None:
    world = World(num_pages=12, max_batch_input_tokens=4, kvcache_ce_watermark=1.0)
    world.submit("old", token_request(prompt(6, 1), max_tokens=40))
    step(world)
    step(world)
    for name in "ab":
        world.submit(name, token_request(prompt(36), max_tokens=1))
    world.finish_all()
    assert world.scheduler.stats().counters["preemptions_total"] > 0


def test_prompts_to_be_scored_are_computed_whole_and_wait_for_no_row() -> None:
    world = World(num_pages=40)
    world.submit("a", token_request(prompt(9), max_tokens=1))
    world.submit("b", token_request(prompt(9), max_tokens=1, prompt_logprobs=True))
    assert step(world) == [("a", 9), ("b", 9)]
    world.finish_all()
    assert world.pool.counters.num_duplicates == 2


def test_without_prefix_caching_no_row_waits() -> None:
    from triptych.core.kv.pages import PagePool

    pool = PagePool(num_pages=40, page_size=4, enable_prefix_caching=False)
    world = World(pool=pool)
    for name in "ab":
        world.submit(name, token_request(prompt(9), max_tokens=2))
    assert step(world) == [("a", 9), ("b", 9)]
    world.finish_all()
    assert pool.counters.num_hits == 0


def test_a_scored_prompt_that_gave_way_is_scored_once() -> None:
    world = World(num_pages=9, max_batch_input_tokens=4, kvcache_ce_watermark=1.0)
    world.submit("a", token_request(prompt(3), max_tokens=30))
    step(world)
    world.submit("b", token_request(prompt(28, 1), max_tokens=4, prompt_logprobs=True))
    world.finish_all()
    scores = [entry.token_id for delta in world.deltas("b") for entry in delta.prompt_logprobs]
    assert scores == list(prompt(28, 1)[1:])
    assert world.scheduler.stats().counters["preemptions_total"] > 0
