"""Whether a row computes this step or takes a prediction: where step caches decide.

Owns the decision alone: `Decisions.decide` asks the row's rule, a `Gate`, within the bounds that
hold for every rule. Knows no tensor: what a rule wants to know of the model reaches it as one
number, the row's own distance. A gate is asked once per step, in order, and keeps its own state.
A rule that asks nothing of the model can be asked ahead of time, for the whole way.
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
    """What a gate compares from step to step, and with which step's.

    The distance between `a` now and `b` then is mean|a - b| / mean|b| over the row alone.
    """

    MODULATED_INPUT = "modulated input"  # of the first block, against the step before
    FIRST_RESIDUAL = "first residual"  # what the first block adds, against the last computed step


class Gate(ABC):
    """One row's rule. `signal` is what it compares; `None` if it decides without the model."""

    signal: ClassVar[GateSignal | None] = None

    @abstractmethod
    def wants_compute(self, step: int, distance: float) -> bool:
        """Whether to compute step `step`. `distance` is infinite where there is no reference."""

    def computed(self) -> None:  # noqa: B027 - most rules keep nothing
        """The step computes, by this rule or another: start again from here."""


@dataclass
class TeaCacheGate(Gate):
    """TeaCache (Liu et al. 2024): add up rescaled distances, compute once they reach a threshold.

    `coefficients` are of the model's polynomial, highest power first.
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
    """FBCache (ParaAttention): compute when the first block's residual has moved by a threshold."""

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
    """MagCache (Ma et al. 2025): skip while the magnitudes, known beforehand, stay near one.

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
    """A plan made beforehand: `plan[i]` says whether step i computes."""

    plan: Sequence[bool]

    @override
    def wants_compute(self, step: int, distance: float) -> bool:
        return self.plan[step]


def spread_ratios(ratios: Sequence[float], num_steps: int) -> tuple[float, ...]:
    """Ratios calibrated at one number of steps, for another: the nearest step's."""
    if num_steps == 1:
        return (ratios[-1],)
    scale = (len(ratios) - 1) / (num_steps - 1)
    # Half to even, as float32 rounds in the reference.
    return tuple(ratios[round(step * scale)] for step in range(num_steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What holds for every rule: the first step computes, so may the last; skips end some time."""

    max_skips: int = 8
    forces_last: bool = True


class Decisions:
    """One row's, taken once per step, in order, over a trajectory of `num_steps` evaluations.

    Raises whatever `open_gate` does at a number of steps that it is not for.
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
        """What the rule compares, if anything."""
        return self._gate.signal

    def start_over(self) -> None:
        """There is nothing left to predict from: the next step computes."""
        self._gate = self._open_gate(self._num_steps)
        self._has_output = False
        self._num_skips = 0
        self._last: tuple[int, bool] | None = None

    def is_forced(self, step: int) -> bool:
        """Whether this step computes whatever the rule says."""
        is_last = step == self._num_steps - 1 and self._bounds.forces_last
        return not self._has_output or is_last or self._num_skips >= self._bounds.max_skips

    def decide(self, step: int, distance: float = math.inf) -> bool:
        """Whether to compute this step. One asked for again, because its run failed, stays so."""
        if self._last is None or self._last[0] != step:
            self._last = step, self._decide(step, distance)
        return self._last[1]

    def may_compute(self, steps: Sequence[int]) -> list[bool]:
        """Which of the next steps may compute: all, where distances decide. Changes nothing."""
        if self.signal is not None:
            return [True] * len(steps)
        ahead = copy(self)
        ahead._gate = copy(self._gate)
        return [ahead.decide(step) for step in steps]

    def take_over(self, step: int, *, computes: bool) -> None:
        """The decision of another rank, which alone has seen what it follows from."""
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
