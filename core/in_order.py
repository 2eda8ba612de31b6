"""Many pieces of work at once, and what comes of them in their order.

Owns how many run. Knows not what they do.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_order(
    works: Iterable[Coroutine[Any, Any, Result]], num_at_once: int
) -> AsyncGenerator[Result, None]:
    """What each of `works` returns, in their order; `num_at_once` are begun and not yielded.

    What one raises ends all. Who leaves early cancels what runs.
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
