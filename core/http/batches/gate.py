"""When a line of a batch may run: in the gaps between the requests of clients.

Owns how many run at once, and how long they give way. Knows no batch.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from triptych.core.http.disconnect import InFlight

PATIENCE_S: Final = 30.0
"""So long a line gives way to clients at most: it is to be answered on the busiest server, too."""


class LineGate:
    """Lets `num_places` lines run at once. Those that wait go in the order they came."""

    def __init__(
        self, in_flight: InFlight, num_places: int, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._in_flight = in_flight
        self.num_places = num_places
        self._places = asyncio.Semaphore(num_places)
        self._patience_s = patience_s

    async def enter(self) -> None:
        """Wait until a line may run."""
        await self._places.acquire()
        try:
            await self._wait()
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """A line has ended."""
        self._places.release()

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                await self._in_flight.quiet.wait()


class LinePlace:
    """One line's place, which it may give up for a while. Leaving it twice is leaving it once."""

    def __init__(self, gate: LineGate) -> None:
        self._gate = gate
        self._is_held = False

    async def enter(self) -> None:
        """Wait until the line may run."""
        await self._gate.enter()
        self._is_held = True

    def leave(self) -> None:
        """Let another line run."""
        if self._is_held:
            self._is_held = False
            self._gate.leave()
