"""The decision of a step cache: whether a row computes a step or predicts it.

Owns the decision alone: `Decisions.decide` consults the row's `Gate`, within bounds that hold for
every gate. Knows no tensor: a gate sees the model only as one number, the row's distance. A gate is
consulted once per step, in order, and keeps its own state. A gate that needs no distance can be
consulted ahead, for the whole trajectory.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from typing_extensions import override


class GateSignal(enum.Enum):
    """The tensor that a gate compares between steps, and the step it is compared with.

    The distance between `a` now and `b` then is mean|a - b| / mean|b| over the row alone.
    """

    MODULATED_INPUT = "modulated input"  # of the first block, compared with the previous step
    FIRST_RESIDUAL = "first residual"  # of the first block, compared with the last computed step


class Gate(ABC):
    """One row's rule. `signal` is the tensor it compares; `None` if it needs no model."""

    signal: ClassVar[GateSignal | None] = None

    @abstractmethod
    def wants_compute(self, step: int, distance: float) -> bool:
        """Whether to compute step `step`. `distance` is infinite where there is no reference."""

    def computed(self) -> None:  # noqa: B027 - most gates keep no state
        """Reset the state: the step computes, by this gate or a bound."""


@dataclass
class TeaCacheGate(Gate):
    """TeaCache (Liu et al. 2024): add up rescaled distances, compute once they reach a threshold.

    `coefficients` are those of the model's polynomial, highest power first.
    """

    coefficients: Sequence[float]
    threshold: float
    signal: ClassVar[GateSignal | None] = GateSignal.MODULATED_INPUT
    _sum: float = field(default=0.0, init=False)

    @override
    def wants_compute(self, step: int, distance: float) -> bool:
        if math.isinf(distance):
            return True
        # A fitted polynomial may dip below zero near its root; a change is never negative.
        self._sum += max(0.0, float(np.polyval(self.coefficients, distance)))
        return self._sum >= self.threshold

    @override
    def computed(self) -> None:
        self._sum = 0.0


@dataclass
class FirstBlockGate(Gate):
    """FBCache (ParaAttention): compute when the first block's residual moved past a threshold."""

    threshold: float
    signal: ClassVar[GateSignal | None] = GateSignal.FIRST_RESIDUAL

    @override
    def wants_compute(self, step: int, distance: float) -> bool:
        return distance > self.threshold


@dataclass
class IntervalGate(Gate):
    """Every `interval`-th step after `warmup` steps: TaylorSeer (Liu et al. 2025).

    The step right after the warm-up is predicted, as in MAX and diffusers. The authors' code
    predicts `interval` - 1 steps there.
    """

    interval: int
    warmup: int

    @override
    def wants_compute(self, step: int, distance: float) -> bool:
        return step < self.warmup or (step - self.warmup - 1) % self.interval == 0


@dataclass
class MagCacheGate(Gate):
    """MagCache (Ma et al. 2025): skip while calibrated magnitude ratios stay near one.

    `ratios[i]` is the calibrated ratio of residual magnitudes of step i to step i - 1, one per step
    (`spread_ratios`). The first `num_retained` steps compute.
    """

    ratios: Sequence[float]
    threshold: float
    max_skips: int
    num_retained: int
    _ratio: float = field(default=1.0, init=False)
    _error: float = field(default=0.0, init=False)
    _num_skips: int = field(default=0, init=False)

    @override
    def wants_compute(self, step: int, distance: float) -> bool:
        if step < self.num_retained:
            return True
        self._ratio *= self.ratios[step]
        self._num_skips += 1
        self._error += abs(1.0 - self._ratio)
        return self._error > self.threshold or self._num_skips > self.max_skips

    @override
    def computed(self) -> None:
        self._ratio, self._error, self._num_skips = 1.0, 0.0, 0


@dataclass
class PlanGate(Gate):
    """A fixed plan: `plan[i]` says whether step i computes."""

    plan: Sequence[bool]

    @override
    def wants_compute(self, step: int, distance: float) -> bool:
        return self.plan[step]


def spread_ratios(ratios: Sequence[float], num_steps: int) -> tuple[float, ...]:
    """Ratios calibrated at one number of steps, resampled to another by nearest step."""
    if num_steps == 1:
        return (ratios[-1],)
    scale = (len(ratios) - 1) / (num_steps - 1)
    # Half to even, as float32 rounds in the reference.
    return tuple(ratios[round(step * scale)] for step in range(num_steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds on every gate: at most `max_skips` in a row, and whether the last step computes."""

    max_skips: int = 8
    forces_last: bool = True


class Decisions:
    """Decisions of one row, one per step, in order, over `num_steps` evaluations.

    Raises as `open_gate` does for an unsuitable number of steps.
    """

    def __init__(self, open_gate: Callable[[int], Gate], bounds: Bounds, num_steps: int) -> None:
        self.num_computed = 0
        self.num_skipped = 0
        self._open_gate = open_gate
        self._bounds = bounds
        self._num_steps = num_steps
        self.start_over()

    @property
    def signal(self) -> GateSignal | None:
        """The signal that the gate compares, if any."""
        return self._gate.signal

    def start_over(self) -> None:
        """Forget all outputs: the next step computes."""
        self._gate = self._open_gate(self._num_steps)
        self._has_output = False
        self._num_skips = 0
        self._last: tuple[int, bool] | None = None

    def is_forced(self, step: int) -> bool:
        """Whether this step computes regardless of the gate."""
        is_last = step == self._num_steps - 1 and self._bounds.forces_last
        return not self._has_output or is_last or self._num_skips >= self._bounds.max_skips

    def decide(self, step: int, distance: float = math.inf) -> bool:
        """Whether to compute this step. Repeated for a step whose run failed, it stays the same."""
        if self._last is None or self._last[0] != step:
            self._last = step, self._decide(step, distance)
        return self._last[1]

    def may_compute(self, steps: Sequence[int]) -> list[bool]:
        """Which of the next steps may compute: all if distances decide. Changes nothing."""
        if self.signal is not None:
            return [True] * len(steps)
        ahead = copy(self)
        ahead._gate = copy(self._gate)
        return [ahead.decide(step) for step in steps]

    def take_over(self, step: int, *, computes: bool) -> None:
        """Adopt the decision of another rank, the only one that has seen the signal."""
        self._last = step, computes
        self._note(computes=computes)

    def _decide(self, step: int, distance: float) -> bool:
        wants = self._gate.wants_compute(step, distance)
        computes = wants or self.is_forced(step)
        self._note(computes=computes)
        return computes

    def _note(self, *, computes: bool) -> None:
        if computes:
            self._gate.computed()
            self._has_output = True
            self._num_skips = 0
            self.num_computed += 1
        else:
            self._num_skips += 1
            self.num_skipped += 1
