"""`--schedule-policy lpm`: waiting prompts by their cached prefixes."""

import pytest

from support.token_steps import prompt, shape, step
from support.token_world import World, token_request
from triptych.core.kv.pages import PagePool
from triptych.schedulers.tokens.prefix_order import MAX_OVERTAKEN, by_prefix, overtaken_by
from triptych.schedulers.tokens.state import SequenceState

STEM = prompt(16, 7)
"""Four pages, which `_world` has in its cache."""


def _world(**options: object) -> World:
    world = World(num_pages=100, max_length=100, max_batch_size=1, schedule_policy="lpm", **options)
    world.submit("stem", token_request(STEM, max_tokens=1))
    world.run()
    return world


def _begun(world: World) -> str:
    """The prompt that the next step computes; it ends with it."""
    ((name, _),) = step(world)
    return name


def test_the_longest_cached_prefix_is_first() -> None:
    world = _world()
    world.submit("none", token_request(prompt(8, 1), max_tokens=1))
    world.submit("half", token_request((*STEM[:8], *prompt(9, 2)), max_tokens=1))
    world.submit("most", token_request((*STEM, *prompt(9, 3)), max_tokens=1))
    world.submit("late", token_request((*STEM, *prompt(9, 4)), max_tokens=1))
    assert [_begun(world) for _ in range(4)] == ["most", "late", "half", "none"]


def test_a_prompt_is_overtaken_so_often_only() -> None:
    world = _world()
    world.submit("none", token_request(prompt(8, 1), max_tokens=1))
    for index in range(MAX_OVERTAKEN + 4):
        world.submit(f"{index}", token_request((*STEM, *prompt(2, index)), max_tokens=1))
    names = [_begun(world) for _ in range(MAX_OVERTAKEN + 5)]
    assert names.index("none") == MAX_OVERTAKEN


def test_clients_take_turns() -> None:
    """A client without cached prefixes does not wait for one that has many."""
    world = _world()
    for index in range(6):
        request = token_request((*STEM, *prompt(8, index)), max_tokens=1)
        world.submit(f"ann{index}", request, client="ann")
    world.submit("bob", token_request(prompt(24, 9), max_tokens=1), client="bob")
    names = [_begun(world) for _ in range(7)]
    assert names.index("bob") <= 3


def test_a_large_prompt_of_another_client_is_overtaken_so_often_only() -> None:
    world = World(
        num_pages=24, max_length=100, max_batch_size=4, max_queue_size=99, schedule_policy="lpm"
    )
    world.submit("held", token_request(prompt(16, 1), max_tokens=60), client="ann")
    step(world)
    world.submit("large", token_request(prompt(90, 2), max_tokens=1), client="bob")
    for index in range(MAX_OVERTAKEN + 20):
        world.submit(f"{index}", token_request(prompt(4, index), max_tokens=1), client="cid")
    begun = [name for _ in range(8) for name, _ in step(world) if name != "held"]
    assert len(set(begun)) <= MAX_OVERTAKEN + 4, "a few more may pass in one step"
    world.finish_all()


def test_a_shared_beginning_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of prompts with one long beginning may wait at each step."""
    world = _world(max_queue_size=400)
    for index in range(100):
        world.submit(f"{index}", token_request((*STEM, *prompt(2, index)), max_tokens=1))
    sizes: list[int] = []
    peek = PagePool.peek
    monkeypatch.setattr(
        PagePool, "peek", lambda pool, keys: sizes.append(len(keys)) or peek(pool, keys)
    )
    rows = list(by_prefix(world.scheduler._state.waiting, world.scheduler._state.pool))
    assert len(rows) == len(sizes) == 100
    assert sum(sizes) == 4, "the pages of the first; others begin after them"


def test_waiting_rows_of_other_clients_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _world(max_queue_size=400)
    for index in range(200):
        world.submit(f"{index}", token_request(prompt(2, index), max_tokens=1), client="ann")
    world.submit("bob", token_request(prompt(2, 1), max_tokens=1), client="bob")
    waiting = list(world.scheduler._state.waiting)
    judged: list[SequenceState] = []
    monkeypatch.setattr(SequenceState, "can_step", property(lambda row: not judged.append(row)))
    assert not overtaken_by([waiting[0], waiting[-1]], waiting)
    assert not judged
    assert overtaken_by(waiting[2:4], waiting) == [waiting[0]] * 2 + [waiting[1]] * 2


def test_only_the_first_of_a_long_queue_are_compared() -> None:
    world = _world(max_queue_size=400)
    for index in range(130):
        world.submit(f"{index}", token_request(prompt(2, index), max_tokens=1))
    world.submit("most", token_request((*STEM, *prompt(9, 3)), max_tokens=1))
    assert [_begun(world) for _ in range(4)] == ["0", "1", "2", "most"]
    assert shape(world.book())
    world.commit()
