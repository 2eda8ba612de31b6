"""An asyncio loop on a thread of its own, for callers that are not asynchronous.

Owns the thread and the way in and out of it. Works where another loop already runs, as in a
notebook.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class End:
    """The end of a stream in a queue: no item can be mistaken for it, not even an exception."""

    error: Exception | None = None


class LoopThread:
    """Runs coroutines and async generators for synchronous and foreign-loop callers."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` to its end and return what it returned, blocking the caller."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C while waiting must not leave the work running
            raise

    async def run_async(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` here, awaited on the caller's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def iterate(self, make: Callable[[], AsyncGenerator[Item, None]]) -> Iterator[Item]:
        """Iterate an async generator from a synchronous caller; leaving early closes it."""
        ready: queue.SimpleQueue[Item | End] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async with aclosing(make()) as items:
                    async for item in items:
                        ready.put(item)
            except Exception as error:  # carried to the caller, which raises it
                ready.put(End(error))
            else:
                ready.put(End())

        future = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while not isinstance(item := ready.get(), End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            future.cancel()

    async def iterate_async(
        self, make: Callable[[], AsyncGenerator[Item, None]]
    ) -> AsyncGenerator[Item, None]:
        """Iterate an async generator that runs here from the caller's loop."""
        items = make()
        try:
            while True:
                try:
                    item = await self.run_async(_next(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            await self.run_async(items.aclose())

    def close(self) -> None:
        """Stop the loop and wait for its thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _next(items: AsyncGenerator[Item, None]) -> Item:
    return await anext(items)
