"""When pages run short: the watermark, who gives way, and that all answers come out right."""

import pytest

from support.token_steps import prompt, step
from support.token_world import World, token_request


def preemptions(world: World) -> dict[str, int]:
    return {
        name: max((delta.num_preemptions for delta in world.deltas(name)), default=0)
        for name in world.jobs
    }


def test_a_prompt_starts_only_below_the_watermark() -> None:
    world = World(num_pages=10, kvcache_ce_watermark=0.5)
    world.submit("a", token_request(prompt(8), max_tokens=6))
    world.submit("b", token_request(prompt(9, 1), max_tokens=2))
    world.submit("c", token_request(prompt(8, 2), max_tokens=2))
    assert step(world) == [("a", 8), ("c", 8)]  # 2 + 3 of 10 pages are not below half; 2 + 2 are
    world.finish_all()


def test_alone_a_prompt_starts_above_the_watermark() -> None:
    world = World(num_pages=10, kvcache_ce_watermark=0.1)
    world.submit("a", token_request(prompt(30), max_tokens=2))
    world.submit("b", token_request(prompt(2), max_tokens=2))
    assert step(world) == [("a", 30)]
    world.finish_all()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_newest_gives_way_and_every_answer_is_right(depth: int) -> None:
    world = World(num_pages=10, depth=depth, kvcache_ce_watermark=1.0)
    for index in range(3):
        world.submit(f"{index}", token_request(prompt(8, index), max_tokens=20))
    world.finish_all()
    counts = preemptions(world)
    assert counts["0"] == 0
    assert counts["2"] > 0


def test_a_resumed_row_keeps_what_is_still_cached() -> None:
    world = World(num_pages=10, kvcache_ce_watermark=1.0)
    for index in range(2):
        world.submit(f"{index}", token_request(prompt(8, index), max_tokens=20))
    world.finish_all()
    assert world.pool.counters.num_hits > 0


def test_the_oldest_is_never_pushed_out_by_a_newer_one() -> None:
    world = World(num_pages=8, kvcache_ce_watermark=1.0)
    world.submit("old", token_request(prompt(16), max_tokens=3))
    world.submit("new", token_request(prompt(13, 1), max_tokens=8))
    world.finish_all()
    assert preemptions(world)["old"] == 0


def test_priority_decides_which_row_is_preempted() -> None:
    world = World(num_pages=8, kvcache_ce_watermark=1.0, schedule_policy="priority")
    world.submit("low", token_request(prompt(8), max_tokens=20, priority=0))
    step(world)
    world.submit("high", token_request(prompt(8, 1), max_tokens=20, priority=1))
    world.finish_all()
    assert preemptions(world) == {"low": 1, "high": 0}


@pytest.mark.parametrize("limit", [0, 1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_gives_way_only_so_often(limit: int, depth: int) -> None:
    world = World(
        num_pages=12,
        depth=depth,
        max_preemptions=limit,
        kvcache_ce_watermark=1.0,
        max_batch_size=6,
        max_queue_size=100,
    )
    for index in range(30):
        world.submit(f"{index}", token_request(prompt(7, index), max_tokens=26))
    world.finish_all()
    assert max(preemptions(world).values()) == limit


def test_slow_readers_give_way_first_even_if_oldest() -> None:
    world = World(num_pages=10, kvcache_ce_watermark=1.0)
    for index in range(2):
        world.submit(f"{index}", token_request(prompt(16, index), max_tokens=20))
    step(world)
    world.scheduler.set_paused("0", True)
    world.run()
    assert len(world.output_ids("1")) == 20
    world.finish_all()
    assert preemptions(world) == {"0": 1, "1": 0}


def test_prompts_take_the_slots_and_pages_of_slow_readers() -> None:
    world = World(num_pages=10, max_batch_size=2)
    for index in range(2):
        world.submit(f"{index}", token_request(prompt(16, index), max_tokens=4))
    step(world)
    world.scheduler.set_paused("0", True)
    world.scheduler.set_paused("1", True)
    world.submit("big", token_request(prompt(36, 2), max_tokens=2))
    assert step(world) == [("big", 36)]
    world.finish_all()
    assert preemptions(world) == {"0": 1, "1": 1, "big": 0}


def test_a_protected_slow_reader_keeps_its_place() -> None:
    world = World(num_pages=10, max_batch_size=1, max_preemptions=0)
    world.submit("slow", token_request(prompt(16), max_tokens=4))
    step(world)
    world.scheduler.set_paused("slow", True)
    world.submit("next", token_request(prompt(4, 1), max_tokens=2))
    world.run()
    assert not world.outputs["next"]
    world.finish_all()


def test_rows_that_share_all_their_pages_still_make_room() -> None:
    """Neither victim frees a page alone; both together do."""
    world = World(num_pages=7, max_batch_size=4, kvcache_ce_watermark=1.0, max_length=28)
    shared = prompt(8)
    world.submit("first", token_request(prompt(12, 1), max_tokens=16))
    step(world)
    world.submit("warm", token_request(shared, max_tokens=1))
    step(world)
    for name in "ab":
        world.submit(name, token_request((*shared, 9), max_tokens=4))
    world.finish_all()


def test_begun_prompts_give_way_too() -> None:
    world = World(num_pages=9, max_batch_input_tokens=4, kvcache_ce_watermark=1.0)
    world.submit("a", token_request(prompt(3), max_tokens=30))
    step(world)
    world.submit("b", token_request(prompt(28, 1), max_tokens=2))
    world.finish_all()
    assert preemptions(world)["a"] == 0
