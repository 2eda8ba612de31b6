"""When a line of a batch may run: in the gaps between the requests of clients.

Owns how many run at once, whose is next, and how long they give way. Knows no batch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Final

from triptych.core.http.disconnect import InFlight

PATIENCE_S: Final = 30.0
"""So long a line gives way to clients at most: it is to be answered on the busiest server, too."""


class LineGate:
    """Lets `num_places` lines run at once.

    A place that comes free goes to the owner with the fewest lines running, and to the line of
    this owner that came first.
    """

    def __init__(
        self, in_flight: InFlight, num_places: int, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._in_flight = in_flight
        self.num_places = num_places
        self._running: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._patience_s = patience_s

    async def enter(self, owner: str = "") -> None:
        """Wait until a line may run."""
        await self._take_place(owner)
        try:
            await self._wait()
        except BaseException:
            self.leave(owner)
            raise

    def leave(self, owner: str = "") -> None:
        """A line has ended."""
        self._running[owner] -= 1
        self._running += Counter()  # owners without any are forgotten
        self._waiting = [turn for turn in self._waiting if not turn[1].done()]
        if self._waiting:
            turn = min(self._waiting, key=lambda turn: self._running[turn[0]])
            self._waiting.remove(turn)
            self._running[turn[0]] += 1
            turn[1].set_result(None)

    async def _take_place(self, owner: str) -> None:
        if self._running.total() < self.num_places:
            self._running[owner] += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append((owner, place))
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was given, and is not wanted any more
                self.leave(owner)
            raise

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                await self._in_flight.quiet.wait()


class LinePlace:
    """One line's place, which it may give up for a while. Leaving it twice is leaving it once."""

    def __init__(self, gate: LineGate, owner: str) -> None:
        self._gate = gate
        self._owner = owner
        self._is_held = False

    async def enter(self) -> None:
        """Wait until the line may run."""
        await self._gate.enter(self._owner)
        self._is_held = True

    def leave(self) -> None:
        """Let another line run."""
        if self._is_held:
            self._is_held = False
            self._gate.leave(self._owner)
