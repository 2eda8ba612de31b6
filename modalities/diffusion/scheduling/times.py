"""How long a run of the model takes, by its rows and their size, learned from the runs there were.

Owns the estimate. A device that is full takes twice as long for twice the rows, an empty one takes
no longer at all, and where between the two a model stands can only be measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from triptych.schedulers.cost import UNKNOWN_COST_S

_NUM_TRUSTED = 2  # the first run of a shape compiles and pages in: alone it says nothing
_NUM_RECENT = 5
_MEMORY = 256  # runs after which a number of rows not run again is forgotten, and so tried anew
_HOPE = 0.98  # of a row's time, for each doubling away from what was seen
_MAX_SIZES = 64


@dataclass(slots=True)
class _Runs:
    """Of one size: the latest seconds by number of rows, and which run was the last of it."""

    num_runs: int = 0
    seconds: dict[int, deque[float]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)

    def add(self, num_rows: int, seconds: float) -> None:
        self.num_runs += 1
        self.last[num_rows] = self.num_runs
        self.seconds.setdefault(num_rows, deque(maxlen=_NUM_RECENT)).append(seconds)
        for stale in [rows for rows, at in self.last.items() if at <= self.num_runs - _MEMORY]:
            del self.last[stale], self.seconds[stale]

    def known(self) -> list[tuple[int, float]]:
        """Rows and the shortest of their latest runs: what else ran meanwhile only lengthens."""
        trusted = (
            (rows, times) for rows, times in self.seconds.items() if len(times) >= _NUM_TRUSTED
        )
        return sorted((rows, min(times)) for rows, times in trusted)


class RunTimes:
    """Seconds of runs of up to `max_rows` rows."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._sizes: OrderedDict[int, _Runs] = OrderedDict()

    def observe(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """Learn from a run of rows of so many tokens each."""
        if num_rows < 1 or seconds <= 0:
            return
        self._sizes.setdefault(num_tokens, _Runs()).add(num_rows, seconds)
        self._sizes.move_to_end(num_tokens)
        if len(self._sizes) > _MAX_SIZES:
            self._sizes.popitem(last=False)

    def of(self, num_tokens: int, num_rows: int) -> float:
        """How long a run takes."""
        return _between(self._known(num_tokens), num_rows)

    def table(self, num_tokens: int) -> list[float]:
        """`[b - 1]` is how long a run of b rows takes.

        Between numbers of rows that were seen, on a line. Beyond them a row is thought a little
        cheaper than at the nearest that was, and more so further away: so it will be tried.
        """
        known = self._known(num_tokens)
        return [_between(known, num_rows) for num_rows in range(1, self._max_rows + 1)]

    def _known(self, num_tokens: int) -> list[tuple[int, float]]:
        """Rows and seconds, of this size or of the nearest one that was seen."""
        if num_tokens in self._sizes and (known := self._sizes[num_tokens].known()):
            return known
        by_distance = sorted(self._sizes, key=lambda size: abs(math.log(size / num_tokens)))
        for size in by_distance:
            if known := self._sizes[size].known():
                scale = num_tokens / size
                return [(num_rows, seconds * scale) for num_rows, seconds in known]
        return [(1, UNKNOWN_COST_S)]


def _between(known: list[tuple[int, float]], num_rows: int) -> float:
    at = bisect_left(known, (num_rows, 0.0))
    if 0 < at < len(known):
        (low, low_s), (high, high_s) = known[at - 1 : at + 1]
        return low_s + (high_s - low_s) * (num_rows - low) / (high - low)
    nearest, nearest_s = known[min(at, len(known) - 1)]
    ratio = num_rows / nearest
    return nearest_s * ratio * math.pow(_HOPE, abs(math.log2(ratio)))
