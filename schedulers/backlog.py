"""Device seconds that a model's jobs take, learned from the steps that ran for them.

Owns the learned seconds of a job. Knows nothing of routers and autoscalers, which use the backlog.
"""

from __future__ import annotations

from triptych.schedulers.cost import UNKNOWN_COST_S

_KEPT = 0.95  # what was learned fades over some twenty jobs


class JobSeconds:
    """A decaying mean: seconds of steps divided by the number of ended jobs."""

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._num_ended = 0.0

    def spend(self, seconds: float) -> None:
        """Add the seconds of a step."""
        self._spent_s += seconds

    def end(self) -> None:
        """Count a job that ended."""
        self._spent_s *= _KEPT
        self._num_ended = (self._num_ended + 1) * _KEPT

    @property
    def mean_s(self) -> float:
        """The seconds of a job; `UNKNOWN_COST_S` before the first has ended."""
        return self._spent_s / self._num_ended if self._num_ended else UNKNOWN_COST_S

    def left_s(self, *, num_waiting: int, num_running: int) -> float:
        """Seconds of work left in these jobs; running jobs count as half done."""
        return self.mean_s * (num_waiting + num_running / 2)
