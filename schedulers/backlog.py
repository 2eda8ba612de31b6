"""Seconds of the device that a model's jobs take, from the steps that ran for them.

Owns the learned seconds of a job. What a router or an autoscaler makes of the backlog is theirs.
"""

from __future__ import annotations

from triptych.schedulers.cost import UNKNOWN_COST_S

_KEPT = 0.95  # what was learned fades over some twenty jobs


class JobSeconds:
    """A decaying mean: seconds of steps over jobs that ended."""

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._num_ended = 0.0

    def spend(self, seconds: float) -> None:
        """A step took so long."""
        self._spent_s += seconds

    def end(self) -> None:
        """A job has ended."""
        self._spent_s *= _KEPT
        self._num_ended = (self._num_ended + 1) * _KEPT

    @property
    def mean_s(self) -> float:
        """Seconds of a job; `UNKNOWN_COST_S` before any was seen to its end."""
        return self._spent_s / self._num_ended if self._num_ended else UNKNOWN_COST_S

    def left_s(self, *, num_waiting: int, num_running: int) -> float:
        """Seconds of work that such jobs are; those that run are half done, on average."""
        return self.mean_s * (num_waiting + num_running / 2)
