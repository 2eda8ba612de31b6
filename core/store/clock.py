"""The time by which documents expire: the wall clock's, without its leaps.

Owns what a leap is and when it is believed. A wall clock may be set wrongly for a moment, by a bad
answer over the network or in a machine that wakes; what expires in that moment is gone for good. So
a leap counts only once it has lasted. Knows no documents.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

LEAP_LASTS_S: Final = 3600.0
"""How long the clock must go on from where it leapt to."""
_LEAPS_PER_LIFETIME: Final = 30
"""A leap by less than this part of a lifetime is believed at once: little can be lost by it."""


def steady_s() -> float:
    """Seconds on a clock that nothing sets; it goes on while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class ExpiryClock:
    """Times since the epoch. `seen_s` is the last `now_s` of the process before this one.

    Lifetimes are `ttl_s` long. All methods are called by one thread.
    """

    def __init__(
        self,
        wall: Callable[[], float],
        steady: Callable[[], float],
        *,
        ttl_s: float,
        seen_s: float | None,
    ) -> None:
        self._wall = wall
        self._steady = steady
        self._believed_s = ttl_s / _LEAPS_PER_LIFETIME
        start_s = wall() if seen_s is None else seen_s
        self._ahead_s = start_s - steady()
        """How far the believed time is ahead of the steady clock."""
        self._leapt_s = self._ahead_s
        self._leapt_at_s = steady()

    def now_s(self) -> float:
        """What has expired by this time is over; a leap that has lasted counts from here on."""
        steady_s = self._steady()
        ahead_s = self._wall() - steady_s
        if abs(ahead_s - self._leapt_s) > self._believed_s:
            self._leapt_at_s = steady_s
        self._leapt_s = ahead_s
        is_small = abs(ahead_s - self._ahead_s) <= self._believed_s
        if is_small or steady_s - self._leapt_at_s >= LEAP_LASTS_S:
            self._ahead_s = ahead_s
        return steady_s + self._ahead_s

    def latest_s(self) -> float:
        """From when a lifetime that begins now is counted, whichever clock is wrong."""
        return max(self._wall(), self.now_s())
