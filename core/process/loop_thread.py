"""An asyncio loop on its own thread, for synchronous callers.

Owns the thread, the calls into it, and the number of coroutines that run at once. Also works while
another loop is running, as in a notebook.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

MAX_AHEAD = 256
"""Items of a stream buffered for a slow reader; at this bound the producer waits."""

Result = TypeVar("Result")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class End:
    """The end of a stream in a queue; its own type, since items may themselves be exceptions."""

    error: BaseException | None = None


class LoopThread:
    """Runs coroutines and async generators for synchronous and foreign-loop callers.

    After `close` every call raises `RuntimeError`.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work`, blocking the caller, and return its result."""
        future = self._start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C while waiting must not leave the work running
            raise

    async def run_async(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` on this loop and await it on the caller's loop."""
        return await asyncio.wrap_future(self._start(work))

    def iterate(self, make: Callable[[], AsyncGenerator[Item, None]]) -> Iterator[Item]:
        """Iterate an async generator from a synchronous caller; leaving early closes it."""
        ready: queue.SimpleQueue[Item | End] = queue.SimpleQueue()
        room = asyncio.Semaphore(MAX_AHEAD)
        future = self._start(_pump(make, ready.put, room))
        try:
            while not isinstance(item := ready.get(), End):
                self._release(room)
                yield item
            if item.error is not None:
                raise item.error
        finally:
            future.cancel()

    async def iterate_async(
        self, make: Callable[[], AsyncGenerator[Item, None]]
    ) -> AsyncGenerator[Item, None]:
        """Like `iterate`, for an asynchronous caller on another loop."""
        caller = asyncio.get_running_loop()
        ready: asyncio.Queue[Item | End] = asyncio.Queue()
        room = asyncio.Semaphore(MAX_AHEAD)

        def put(item: Item | End) -> None:
            caller.call_soon_threadsafe(ready.put_nowait, item)

        future = self._start(_pump(make, put, room))
        try:
            while not isinstance(item := await ready.get(), End):
                self._release(room)
                yield item
            if item.error is not None:
                raise item.error
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel running work, stop the loop and join its thread. Closing twice is fine."""
        if not self.is_closed:
            self.run(_cancel_others())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _release(self, room: asyncio.Semaphore) -> None:
        with suppress(RuntimeError):  # closed: buffered items can still be read
            self._loop.call_soon_threadsafe(room.release)

    def _start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        if self.is_closed:
            work.close()
            raise RuntimeError(f"{self._thread.name} is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)


async def _pump(
    make: Callable[[], AsyncGenerator[Item, None]],
    put: Callable[[Item | End], None],
    room: asyncio.Semaphore,
) -> None:
    """Put every item of a generator, then its `End`."""
    try:
        async with aclosing(make()) as items:
            async for item in items:
                await room.acquire()
                put(item)
    except BaseException as error:  # carried to the caller, which raises it
        put(End(error))
        if not isinstance(error, Exception):
            raise
    else:
        put(End())


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def run_in_order(
    works: Iterable[Coroutine[Any, Any, Result]], num_at_once: int
) -> AsyncGenerator[Result, None]:
    """The results of `works`, in order, with at most `num_at_once` running.

    The first error ends the iteration; leaving early cancels running work.
    """
    running: deque[asyncio.Task[Result]] = deque()
    try:
        for work in works:
            running.append(asyncio.create_task(work))
            if len(running) == num_at_once:
                yield await running.popleft()
        while running:
            yield await running.popleft()
    finally:
        for task in running:
            task.cancel()
