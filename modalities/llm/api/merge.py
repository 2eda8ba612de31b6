"""Several async streams as one, in the order their items come.

Owns nothing but the merging: no item is lost, the first error ends all, and closing the merged
stream closes every source.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from triptych.core.loop_thread import End

Item = TypeVar("Item")


async def merge(sources: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Yield the items of all `sources` as they come.

    The hand-over holds one item, so a slow consumer slows its sources down (and through them the
    engine) instead of filling memory.
    """
    queue: asyncio.Queue[Item | End] = asyncio.Queue(maxsize=1)

    async def pump(source: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(source) as items:
                async for item in items:
                    await queue.put(item)
        except Exception as error:  # carried to the consumer, which raises it
            await queue.put(End(error))
        else:
            await queue.put(End())

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if not isinstance(item, End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
