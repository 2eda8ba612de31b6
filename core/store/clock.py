"""The clock by which documents expire: wall time without transient jumps.

Owns the detection of jumps. A wall clock may briefly be wrong, after a bad network time or when a
machine wakes up, and documents that expire at that moment are lost. So a jump counts only after it
has lasted. Knows no documents.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

JUMP_LASTS_S: Final = 3600.0
"""How long the wall clock must continue from its new time before a jump counts."""
_JUMPS_PER_LIFETIME: Final = 30
"""A jump by less than this fraction of a lifetime counts at once: little can be lost by it."""


def steady_s() -> float:
    """Seconds on a monotonic clock that includes time while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class ExpiryClock:
    """Times since the epoch. `seen_s` is the last recorded `now_s` of the previous process.

    Lifetimes are `ttl_s` long. All methods are called from one thread.
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
        self._small_jump_s = ttl_s / _JUMPS_PER_LIFETIME
        start_s = wall() if seen_s is None else seen_s
        self._ahead_s = start_s - steady()
        """The offset of the accepted time from the steady clock."""
        self._jump_ahead_s = self._ahead_s
        self._jump_at_s = steady()

    def now_s(self) -> float:
        """The current time for expiry; accepts a jump that has lasted."""
        steady_s = self._steady()
        ahead_s = self._wall() - steady_s
        if abs(ahead_s - self._jump_ahead_s) > self._small_jump_s:
            self._jump_at_s = steady_s
        self._jump_ahead_s = ahead_s
        is_small = abs(ahead_s - self._ahead_s) <= self._small_jump_s
        if is_small or steady_s - self._jump_at_s >= JUMP_LASTS_S:
            self._ahead_s = ahead_s
        return steady_s + self._ahead_s

    def latest_s(self) -> float:
        """The start of a lifetime that begins now: the later of wall time and `now_s`."""
        return max(self._wall(), self.now_s())
