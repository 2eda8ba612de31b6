"""Prompts that share a step with a long one."""

from support.token_steps import prompt, shape, step
from support.token_world import World, token_request
from triptych.schedulers.tokens.state import SequenceState
from triptych.schedulers.tokens.step import TokenLimits


def _world(budget: int, num_pages: int = 400, **options: object) -> World:
    return World(num_pages=num_pages, max_length=400, max_batch_input_tokens=budget, **options)


def _submit(world: World, *lengths: int) -> None:
    for length in lengths:
        index = len(world.jobs)
        world.submit(f"{index}", token_request(prompt(length, index), max_tokens=1))


def _num_times_overtaken(world: World, name: str) -> int:
    rows = world.scheduler.tokens.state.rows
    return next(row.num_times_overtaken for row in rows if row.name == name)


def test_a_short_prompt_passes_a_long_one_even_if_it_fills_several_steps() -> None:
    """As on a slow device, where a step has room for few tokens."""
    world = _world(8)
    _submit(world, 200)
    step(world)
    _submit(world, 10)
    assert [step(world) for _ in range(3)] == [[("0", 4), ("1", 4)]] * 2 + [[("0", 6), ("1", 2)]]


def test_the_shortest_of_several_goes_first() -> None:
    world = _world(16)
    _submit(world, 300)
    step(world)
    _submit(world, 90, 40, 3)
    assert step(world) == [("0", 8), ("3", 3), ("2", 5)]
    assert step(world) == [("0", 8), ("2", 8)]
    world.finish_all()


def test_a_prompt_of_like_length_waits() -> None:
    world = _world(16)
    _submit(world, 200, 150)
    assert step(world) == [("0", 16)]
    world.finish_all()


def test_cached_pages_are_no_work() -> None:
    """An agent's next turn is as long as its last one, and nearly all of it is computed."""
    world = _world(16)
    turn = prompt(100, 7)
    world.submit("turn", token_request(turn, max_tokens=1))
    world.run()
    _submit(world, 300)
    step(world)
    _submit(world, 60)
    world.submit("next", token_request((*turn, 1, 2, 3), max_tokens=1))
    assert step(world) == [("1", 8), ("next", 3), ("2", 5)]
    world.finish_all()


def test_higher_priority_passes_whatever_its_length_and_lower_does_not() -> None:
    world = _world(16, schedule_policy="priority")
    for name, length, priority in (("low", 3, 0), ("long", 200, 1), ("next", 3, 1)):
        request = token_request(prompt(length, len(name)), max_tokens=1, priority=priority)
        world.submit(name, request)
    assert step(world) == [("long", 13), ("next", 3)]
    world.submit("high", token_request(prompt(300, 9), max_tokens=1, priority=2))
    assert step(world) == [("long", 8), ("high", 8)]
    world.finish_all()


def test_a_threshold_leaves_room_in_every_step() -> None:
    world = _world(16, long_prefill_token_threshold=4)
    _submit(world, 100)
    assert step(world) == [("0", 4)]
    _submit(world, 90)
    assert step(world) == [("0", 4), ("1", 4)]
    world.finish_all()


def test_a_limit_of_partial_prompts_lets_those_begin_that_fit_whole() -> None:
    world = _world(16, max_num_partial_prefills=1)
    _submit(world, 200)
    step(world)
    _submit(world, 90, 8)
    assert step(world) == [("0", 8), ("2", 8)]
    assert step(world) == [("0", 16)]
    world.finish_all()


def test_a_row_without_room_does_not_keep_begun_prompts_from_the_rest_of_a_step() -> None:
    world = World(
        num_pages=400,
        max_length=400,
        max_batch_size=2,
        max_batch_input_tokens=16,
    )
    _submit(world, 26, 12)
    assert step(world) == [("0", 8), ("1", 8)]
    _submit(world, 1)
    assert step(world) == [("0", 12), ("1", 4)]
    assert shape(world.book()) == [("0", 6), ("2", 1)]
    world.commit()
    world.finish_all()


def test_a_prompt_without_pages_is_overtaken_so_often_only_while_a_long_one_is_begun() -> None:
    world = _world(16, num_pages=100)
    _submit(world, 200)
    step(world)
    _submit(world, 320)
    passed = 0
    while "0" in world.scheduler._jobs:
        _submit(world, 3, 3)
        passed += sum(name not in "01" for name, _ in step(world))
        assert _num_times_overtaken(world, "1") == passed
    assert passed == 16
    assert step(world)[0][0] == "1"
    world.finish_all()


def test_a_short_prompt_overtakes_only_those_that_came_before_it() -> None:
    world = _world(16, num_pages=100)
    _submit(world, 200)
    step(world)
    _submit(world, 3, 320, 5)
    assert step(world) == [("0", 8), ("1", 3), ("3", 5)]
    assert _num_times_overtaken(world, "2") == 1
    world.finish_all()


def test_a_short_prompt_without_pages_counts_those_that_are_tried_before_it() -> None:
    world = _world(16, num_pages=100)
    _submit(world, 340)
    step(world)
    _submit(world, 90, 3)
    assert step(world) == [("0", 13), ("2", 3)]
    assert _num_times_overtaken(world, "1") == 1
    world.finish_all()


def test_a_prompt_without_pages_is_overtaken_by_a_long_one_and_by_one_in_the_same_step() -> None:
    world = _world(16, num_pages=100)
    world.submit("answered", token_request(prompt(16, 9), max_tokens=20))
    step(world)
    _submit(world, 380, 200, 2)
    assert step(world) == [("answered", 1), ("2", 6), ("3", 2)]
    assert _num_times_overtaken(world, "1") == 2
    world.finish_all()


def test_prompts_without_pages_do_not_keep_short_ones_waiting_however_many_they_are() -> None:
    world = _world(16, num_pages=100)
    _submit(world, 200)
    step(world)
    _submit(world, *[320] * 20, 3)
    assert step(world) == [("0", 13), ("21", 3)]
    world.finish_all()


def test_a_prompt_that_ends_in_its_first_chunk_makes_no_room_for_another_partial_one() -> None:
    """As where an image at its end cannot be cut."""

    def chunk_end(row: SequenceState, start: int, end: int) -> int:
        return row.num_tokens if row.name == "0" else end

    world = _world(24, max_num_partial_prefills=1, long_prefill_token_threshold=4)
    world.scheduler.limits = TokenLimits(chunk_end=chunk_end)
    _submit(world, 14, 90, 80)
    assert step(world) == [("0", 14), ("1", 4)]
    world.finish_all()
