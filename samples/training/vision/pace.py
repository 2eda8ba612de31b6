"""The schedule of a training with a time budget: its learning rate, and when it saves.

Owns the clock. Time spent before a restart counts, so training can resume.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from rich.progress import Progress

_WARM_UP = 0.02
_SAVE_EVERY_S = 120.0


class Pace:
    """Counts the time of one training."""

    def __init__(self, minutes: float, spent_s: float = 0.0) -> None:
        self._total_s, self.spent_s = minutes * 60, spent_s
        self._saved_s = spent_s

    @property
    def rate(self) -> float:
        """The learning rate's share of its peak: a short warm-up, then half a cosine to zero."""
        share = min(self.spent_s / self._total_s, 1.0)
        return min(share / _WARM_UP, 1.0) * (1 + math.cos(math.pi * share)) / 2 + 1e-6

    @property
    def is_time_to_save(self) -> bool:
        """True once every save interval."""
        is_due = self.spent_s - self._saved_s > _SAVE_EVERY_S
        if is_due:
            self._saved_s = self.spent_s
        return is_due

    def steps(self, label: str) -> Iterator[Progress]:
        """One turn per step until the time is over, with a progress bar."""
        with Progress() as bar:
            task = bar.add_task(label, total=self._total_s, completed=self.spent_s)
            while self.spent_s < self._total_s:
                started_s = time.monotonic()
                yield bar
                self.spent_s += time.monotonic() - started_s
                bar.update(task, completed=self.spent_s)
