"""How long another process has been silent, by the watcher's own progress.

Owns the count. A clock alone would blame the other process for time in which the whole machine
stood still: stopped, asleep, or short of what both need. So silence is counted in turns of the
watcher, which come at an interval while it runs: what it missed, the other may have missed, too.
"""

from __future__ import annotations


class Silence:
    """Counts `turn`s since it was last `broken`. A turn comes every `interval_s`, or later."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._num_turns = 0

    def broken(self) -> None:
        """Note that the other process was heard just now."""
        self._num_turns = 0

    def turn(self) -> None:
        """Note that the watcher has come round, and has taken what had arrived by then."""
        self._num_turns += 1

    @property
    def lasts_s(self) -> float:
        """How long it has lasted: never longer than by the clock."""
        return max(0, self._num_turns - 1) * self.interval_s
