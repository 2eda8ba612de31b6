"""Admission of batch lines while no client waits.

Owns the number of running lines, the order of owners, and the longest wait. Knows no batch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Final

from triptych.core.http.disconnect import InFlight

PATIENCE_S: Final = 30.0
"""Longest time that a line waits for clients, so that it also runs on a busy server."""


class LineGate:
    """Lets `num_places` lines run at once.

    A free place goes to the owner with the fewest running lines, and to its oldest line.
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
        """Release the place of a line."""
        self._running[owner] -= 1
        self._running += Counter()  # drops owners without lines
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
            if place.done() and not place.cancelled():  # granted, but no longer needed
                self.leave(owner)
            raise

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                await self._in_flight.quiet.wait()


class LinePlace:
    """The place of one line, which may leave and enter again. A second `leave` does nothing."""

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
