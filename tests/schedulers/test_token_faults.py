"""Rows that end early, steps that raise: who is hurt, and when pages come back."""

import pytest

from support.token_steps import prompt, step
from support.token_world import World, token_request
from triptych.core.engine_api.job import JobState
from triptych.core.errors import InternalError, OutOfMemory


def errors(world: World) -> dict[str, str]:
    return {
        name: outputs[-1].error.code
        for name, outputs in world.outputs.outputs.items()
        if outputs and outputs[-1].error is not None
    }


def world_of(names: str, *, depth: int = 1, max_tokens: int = 8) -> World:
    world = World(num_pages=40, depth=depth)
    for index, name in enumerate(names):
        world.submit(name, token_request(prompt(6, index), max_tokens=max_tokens))
    return world


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_a_cancelled_row_holds_is_free_when_its_steps_are_over(depth: int) -> None:
    world = world_of("ab", depth=depth)
    for _ in range(6):
        world.turn()
    is_in_flight = bool(world.in_flight)
    held = world.pool.num_leased
    world.scheduler.cancel("a")
    assert world.deltas("a")[-1].finish_reason == "cancelled"
    assert world.jobs["a"].state is JobState.CANCELLED
    assert (world.pool.num_leased == held) == is_in_flight
    while world.commit():
        world.check()
    assert world.pool.num_leased < held
    world.finish_all()


def test_a_waiting_job_can_be_cancelled() -> None:
    world = world_of("a")
    world.scheduler.cancel("a")
    assert world.scheduler.stats().num_waiting == 0
    world.finish_all()


def test_row_ended_in_flight_sends_nothing_more() -> None:
    world = World(depth=2)
    ids = (1, 2, 3)
    probe = World()
    probe.submit("p", token_request(ids, max_tokens=3))
    probe.finish_all()
    stop = probe.output_ids("p")[0]
    world.submit("a", token_request(ids, max_tokens=9, stop_token_ids=(stop,)))
    assert world.book()
    assert world.book()
    world.commit()
    assert world.deltas("a")[-1].finish_reason == "stop"
    assert world.pool.num_leased == 1
    assert world.book() is None
    world.commit()
    assert world.pool.num_leased == 0
    assert len(world.outputs["a"]) == 1
    world.finish_all()


def test_a_slot_is_not_taken_while_its_last_step_is_in_flight() -> None:
    world = World(depth=2, max_batch_size=1)
    world.submit("a", token_request(prompt(3), max_tokens=9))
    world.submit("b", token_request(prompt(3, 1), max_tokens=2))
    world.book()
    world.scheduler.cancel("a")
    assert world.book() is None
    world.commit()
    assert world.book().rows[0].job_id == "b"
    world.finish_all()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_that_is_not_finite_fails_alone_and_leaves_nothing_to_find(depth: int) -> None:
    world = world_of("abc", depth=depth)
    world.turn()
    world.runner.bad_jobs.add("b")
    world.finish_all()
    assert errors(world) == {"b": "non_finite"}
    world.runner.bad_jobs.clear()
    world.submit("again", token_request(prompt(6, 1), max_tokens=2))
    world.finish_all()
    assert world.deltas("again")[0].num_cached_tokens == 0
    assert world.scheduler.stats().counters["non_finite_total"] == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_raises_ends_its_rows_only(depth: int) -> None:
    world = world_of("ab", depth=depth)
    world.book()
    world.submit("c", token_request(prompt(5, 9), max_tokens=3))
    if depth == 2:
        assert {row.job_id for row in world.book().rows} == {"a", "b", "c"}
    world.fail(InternalError("broken"))
    world.check()
    world.finish_all()
    assert errors(world) == {"a": "internal_error", "b": "internal_error"}


@pytest.mark.parametrize("depth", [1, 2])
def test_out_of_memory_is_tried_again_in_halves(depth: int) -> None:
    world = world_of("abcde", depth=depth)
    for _ in range(3):
        world.turn()
    while len(world.in_flight) < depth:
        world.book()
    world.fail(OutOfMemory("full"))
    world.check()
    while world.commit():
        world.check()
    assert [name for name, _ in step(world)] == ["a", "b", "c"]
    assert [name for name, _ in step(world)] == ["d", "e"]
    world.finish_all()
    assert errors(world) == {}


def test_out_of_memory_twice_ends_the_half_that_had_it() -> None:
    world = world_of("abcd")
    world.turn()
    for _ in range(2):
        world.book()
        world.fail(OutOfMemory("full"))
        world.check()
    world.finish_all()
    assert errors(world) == {"a": "out_of_memory", "b": "out_of_memory"}


def test_out_of_memory_alone_ends_the_job() -> None:
    world = world_of("a")
    world.book()
    world.fail(OutOfMemory("full"))
    world.finish_all()
    assert errors(world) == {"a": "out_of_memory"}


def test_a_launch_that_fails_while_another_step_is_in_flight() -> None:
    world = world_of("ab", depth=2)
    world.book()
    world.book()
    last, _ = world.in_flight.pop()
    world.runner.finish(last)
    world.runner.spoil(last)
    world.scheduler.fail(last, OutOfMemory("full"), 0.0)
    assert world.book() is None  # the halves wait for the step before
    world.commit()
    assert step(world) == [("a", 1)]
    world.finish_all()
    assert errors(world) == {}


@pytest.mark.parametrize("act", ["cancel", "pause"])
def test_rows_may_leave_what_is_tried_again(act: str) -> None:
    world = world_of("abcd")
    world.turn()
    world.book()
    world.scheduler.set_paused("d", True)
    world.fail(OutOfMemory("full"))
    if act == "cancel":
        world.scheduler.cancel("a")
    else:
        world.scheduler.set_paused("a", True)
    assert [name for name, _ in step(world)] == ["b"]
    assert [name for name, _ in step(world)] == ["c"]
    world.finish_all()
    assert errors(world) == {}


def test_steps_end_in_order() -> None:
    world = world_of("a", depth=2)
    world.book()
    world.book()
    world.in_flight.popleft()
    with pytest.raises(AssertionError, match="order"):
        world.commit()
