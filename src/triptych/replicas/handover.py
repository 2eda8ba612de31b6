"""When an ingress is to drain: another one takes over, of which Serve does not tell it.

Owns the reading of the only sign there is: Serve leaves it out of those that run. Imports nothing
of Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

POLL_S = 2.0
NUM_MISSES = 2
"""Polls in a row that must not find it: one may come while Serve's image changes."""

FindRunning = Callable[[], Awaitable[Collection[str] | None]]
"""The names of those that run; `None` where that cannot be known now."""


async def wait_replaced(name: str, find_running: FindRunning) -> None:
    """Wait until `name` runs, and then until it does no longer."""
    has_run, num_misses = False, 0
    while num_misses < NUM_MISSES:
        await asyncio.sleep(POLL_S)
        if (running := await find_running()) is not None:
            has_run = has_run or name in running
            num_misses = num_misses + 1 if has_run and name not in running else 0
