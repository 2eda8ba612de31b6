"""Detects that another ingress replaces this one, of which Serve does not notify it.

Owns the interpretation of the only sign: Serve no longer lists it as running. Imports nothing of
Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

POLL_S = 2.0
NUM_MISSES = 2
"""Number of polls in a row without the ingress: one may coincide with a change of Serve's list."""

FindRunning = Callable[[], Awaitable[Collection[str] | None]]
"""Returns the names of the running ingresses; `None` if they are unknown at the moment."""


async def wait_replaced(name: str, find_running: FindRunning) -> None:
    """Wait until `name` is listed as running, and then until it is not."""
    has_run, num_misses = False, 0
    while num_misses < NUM_MISSES:
        await asyncio.sleep(POLL_S)
        if (running := await find_running()) is not None:
            has_run = has_run or name in running
            num_misses = num_misses + 1 if has_run and name not in running else 0
