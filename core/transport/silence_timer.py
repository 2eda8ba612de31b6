"""The time since another process was last heard, counted in ticks of the watching process.

Owns the count. A clock would also count time in which the whole machine stood still: suspended, or
out of CPU or memory. Ticks come at an interval only while the watcher itself runs, so such pauses
do not count against the watched process.
"""

from __future__ import annotations


class SilenceTimer:
    """Counts ticks since the last `reset`. Call `tick` every `interval_s`, or later."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._num_turns = 0

    def reset(self) -> None:
        """Note that the other process was heard now."""
        self._num_turns = 0

    def tick(self) -> None:
        """Note that the watcher ran and has handled all messages that had arrived."""
        self._num_turns += 1

    @property
    def elapsed_s(self) -> float:
        """The length of the silence: at most the time by the clock."""
        return max(0, self._num_turns - 1) * self.interval_s
