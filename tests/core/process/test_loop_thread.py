"""Coroutines and async generators for callers that have no loop, or another one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import pytest

from triptych.core.process.loop_thread import MAX_AHEAD, LoopThread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("test")
    yield thread
    thread.close()


class Source:
    """Counts up; remembers that it was closed."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.closed = threading.Event()

    async def items(self) -> AsyncGenerator[object, None]:
        try:
            for number in range(3):
                await asyncio.sleep(0)
                yield number
            if self.error:
                raise self.error
        finally:
            self.closed.set()


async def number() -> int:
    await asyncio.sleep(0)
    return 7


def test_run_returns_and_raises(loop: LoopThread) -> None:
    assert loop.run(number()) == 7
    with pytest.raises(ZeroDivisionError):
        loop.run(divide())


async def divide() -> float:
    return 1 / 0


async def test_other_loops_may_wait_for_it(loop: LoopThread) -> None:
    assert await loop.run_async(number()) == 7


def test_iteration_is_complete_and_in_order(loop: LoopThread) -> None:
    source = Source()
    assert list(loop.iterate(source.items)) == [0, 1, 2]
    assert source.closed.wait(5)


def test_an_error_comes_after_the_items_before_it(loop: LoopThread) -> None:
    seen = []
    with pytest.raises(ValueError, match="late"):  # noqa: PT012 - what came before matters
        for item in loop.iterate(Source(ValueError("late")).items):
            seen.append(item)  # noqa: PERF402
    assert seen == [0, 1, 2]


def test_an_item_that_is_an_exception_is_an_item(loop: LoopThread) -> None:
    async def items() -> AsyncGenerator[Exception, None]:
        yield ValueError("data")

    (item,) = loop.iterate(items)
    assert isinstance(item, ValueError)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_slow_reader_holds_up_its_source(loop: LoopThread, is_async: bool) -> None:
    made = 0

    async def endless() -> AsyncGenerator[int, None]:
        nonlocal made
        while True:
            made += 1
            yield made
            await asyncio.sleep(0)

    async def settle() -> None:
        for _ in range(3 * MAX_AHEAD):
            await asyncio.sleep(0)

    async def read(num: int) -> None:
        items = loop.iterate_async(endless)
        async with aclosing(items):
            for expected in range(1, num + 1):
                assert await anext(items) == expected
            await loop.run_async(settle())

    num = MAX_AHEAD + 5
    if is_async:
        asyncio.run(read(num))
    else:
        items = loop.iterate(endless)
        assert [next(items) for _ in range(num)] == list(range(1, num + 1))
        loop.run(settle())
    assert num <= made <= num + MAX_AHEAD + 1


def test_leaving_early_closes_the_source(loop: LoopThread) -> None:
    source = Source()
    iterator = loop.iterate(source.items)
    assert next(iterator) == 0
    iterator.close()  # type: ignore[attr-defined]
    assert source.closed.wait(5)


async def test_async_iteration_closes_too(loop: LoopThread) -> None:
    whole, left = Source(), Source()
    assert [item async for item in loop.iterate_async(whole.items)] == [0, 1, 2]
    iterator = loop.iterate_async(left.items)
    assert await anext(iterator) == 0
    await iterator.aclose()
    assert left.closed.wait(5)


async def test_a_cancelled_reader_is_cancelled_and_its_source_closed(loop: LoopThread) -> None:
    closed = threading.Event()

    async def endless() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # closing may take a while, too
            closed.set()

    begun = asyncio.Event()

    async def read() -> None:
        async for _ in loop.iterate_async(endless):
            begun.set()

    reader = asyncio.create_task(read())
    await begun.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await asyncio.to_thread(closed.wait, 5)


async def test_an_error_reaches_an_async_reader(loop: LoopThread) -> None:
    with pytest.raises(ValueError, match="late"):
        async for _ in loop.iterate_async(Source(ValueError("late")).items):
            pass


def test_closing_ends_what_runs_and_what_waits_for_it() -> None:
    thread = LoopThread("test")
    closed = threading.Event()

    async def endless() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            closed.set()

    iterator = thread.iterate(endless)
    assert next(iterator) == 1
    thread.close()
    assert closed.is_set()
    with pytest.raises(asyncio.CancelledError):
        next(iterator)
    thread.close()
    assert thread.is_closed
    with pytest.raises(RuntimeError, match="test is closed"):
        thread.run(number())
