"""Which steps one row computes: its rule within the bounds that hold for every rule.

Owns the counting. Knows no tensor. A rule that asks nothing of the model can be asked ahead of
time, for the whole way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

from triptych.modalities.diffusion.caches.gates import GateSignal
from triptych.modalities.diffusion.caches.methods import CacheMethod


class Decisions:
    """One row's, asked once per step, in order, over a trajectory of `num_steps` evaluations.

    Raises whatever the method does at a number of steps that it is not for.
    """

    def __init__(self, method: CacheMethod, num_steps: int) -> None:
        self.num_computed = 0
        self.num_skipped = 0
        self._method = method
        self._num_steps = num_steps
        self.start_over()

    @property
    def signal(self) -> GateSignal | None:
        """What the rule compares, if anything."""
        return self._gate.signal

    def start_over(self) -> None:
        """There is nothing left to predict from: the next step computes."""
        self._gate = self._method.open_gate(self._num_steps)
        self._has_output = False
        self._num_skips = 0
        self._last: tuple[int, bool] | None = None

    def is_forced(self, step: int) -> bool:
        """Whether this step computes whatever the rule says."""
        bounds = self._method.bounds
        is_last = step == self._num_steps - 1 and bounds.forces_last
        return not self._has_output or is_last or self._num_skips >= bounds.max_skips

    def decide(self, step: int, distance: float = math.inf) -> bool:
        """Whether to compute this step. One asked for again, because its run failed, stays so."""
        if self._last is None or self._last[0] != step:
            self._last = step, self._decide(step, distance)
        return self._last[1]

    def foresee(self, steps: Sequence[int]) -> list[bool]:
        """Which of the next steps may compute: all, where distances decide. Changes nothing."""
        if self.signal is not None:
            return [True] * len(steps)
        ahead = copy(self)
        ahead._gate = copy(self._gate)
        return [ahead.decide(step) for step in steps]

    def _decide(self, step: int, distance: float) -> bool:
        wants = self._gate.wants_compute(step, distance)
        computes = wants or self.is_forced(step)
        if computes:
            self._gate.computed()
            self._has_output = True
            self._num_skips = 0
            self.num_computed += 1
        else:
            self._num_skips += 1
            self.num_skipped += 1
        return computes
