"""Prompts that share a step with a long one."""

from support.token_steps import prompt, shape, step
from support.token_world import World, token_request


def _world(budget: int, **options: object) -> World:
    return World(num_pages=400, max_length=400, max_batch_input_tokens=budget, **options)


def _submit(world: World, *lengths: int) -> None:
    for length in lengths:
        index = len(world.jobs)
        world.submit(f"{index}", token_request(prompt(length, index), max_tokens=1))


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
