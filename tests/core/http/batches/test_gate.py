"""Places of lines without a listener: their number, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.http.batches.gate import LineGate, LinePlace
from triptych.core.http.disconnect import InFlight


async def begin(gate: LineGate, *owners: str) -> list[asyncio.Task[None]]:
    """Lines of these owners that want a place, one after the other."""
    tasks = [asyncio.create_task(gate.enter(owner)) for owner in owners]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


def places(tasks: list[asyncio.Task[None]]) -> list[int]:
    """Which of them have one."""
    return [place for place, task in enumerate(tasks) if task.done()]


async def test_an_owner_that_comes_later_has_the_next_place() -> None:
    gate = LineGate(InFlight(), 2)
    tasks = await begin(gate, *("loud",) * 6, "light", "light")
    assert places(tasks) == [0, 1]
    gate.leave("loud")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert places(tasks) == [0, 1, 6], "the first of the owner that has none"
    gate.leave("light")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert places(tasks) == [0, 1, 6, 7]
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize("is_given", [False, True])
async def test_a_line_that_gives_up_keeps_no_place(is_given: bool) -> None:
    gate = LineGate(InFlight(), 1)
    first, second, third = await begin(gate, "a", "a", "b")
    if is_given:
        gate.leave("a")  # to that of b, which has not been woken up yet
        third.cancel()
        await asyncio.sleep(0)
        await asyncio.wait_for(second, 1)
    else:
        second.cancel()
        await asyncio.sleep(0)
        gate.leave("a")
        await asyncio.wait_for(third, 1)
    assert first.done()
    for task in (second, third):
        task.cancel()


async def test_a_line_that_is_cancelled_while_clients_are_asking_keeps_no_place() -> None:
    in_flight = InFlight()
    in_flight.quiet.clear()
    gate = LineGate(in_flight, 1)
    first, second = await begin(gate, "a", "b")
    first.cancel()
    in_flight.quiet.set()
    await asyncio.wait_for(second, 1)


async def test_a_place_is_left_once() -> None:
    gate = LineGate(InFlight(), 1)
    place = LinePlace(gate, "a")
    await place.enter()
    place.leave()
    place.leave()
    tasks = await begin(gate, "a", "b")
    assert places(tasks) == [0]
    tasks[1].cancel()


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60), st.integers(1, 4))
def test_places_are_never_more_nor_lost(acts: list[tuple[str, bool]], num_places: int) -> None:
    async def scenario() -> None:
        gate = LineGate(InFlight(), num_places)
        running: Counter[str] = Counter()
        tasks: list[tuple[str, asyncio.Task[None]]] = []
        for owner, leaves in acts:
            if leaves and running[owner]:
                gate.leave(owner)
                running[owner] -= 1
            elif leaves:
                for each, task in tasks:
                    if each == owner:
                        task.cancel()
            else:
                tasks += [(owner, task) for task in await begin(gate, owner)]
            for _ in range(4):
                await asyncio.sleep(0)
            for each, task in tasks:
                running[each] += task.done() and not task.cancelled()
            tasks = [(each, task) for each, task in tasks if not task.done()]
            assert running.total() == min(num_places, running.total() + len(tasks))
        for _, task in tasks:
            task.cancel()

    asyncio.run(scenario())
