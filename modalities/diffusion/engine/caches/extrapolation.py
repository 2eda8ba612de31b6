"""Predictions of outputs not computed: weighted sums of computed ones.

Owns the weights, in float64: reuse, a polynomial in the noise level through the last computed
points, and TaylorSeer's expansion in the step number. Knows no tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from typing_extensions import override


class Point(NamedTuple):
    """A step of a trajectory: its number, and its share of noise (1 is pure noise)."""

    step: int
    level: float


@dataclass(frozen=True, slots=True)
class Extrapolator(ABC):
    """Predicts an output from the last `order` + 1 computed ones."""

    order: int = 0

    @property
    def num_kept(self) -> int:
        """The number of computed outputs it reads."""
        return self.order + 1

    @abstractmethod
    def weights(self, known: Sequence[Point], at: Point) -> list[float]:
        """A weight for each of the computed points, newest first; there is at least one."""


@dataclass(frozen=True, slots=True)
class DividedDifferences(Extrapolator):
    """The polynomial of degree `order` in the noise level through the last computed points.

    Degree 0 is the last output itself: FBCache, TeaCache, MagCache.

    Newton's form, expanded into a weight per point, so that outputs are kept as they are and no
    precision is lost to differences. Uneven steps need no special case. Of points at one noise
    level (Heun evaluates twice) only the newer counts.
    """

    @override
    def weights(self, known: Sequence[Point], at: Point) -> list[float]:
        chosen: dict[float, int] = {}
        for index, point in enumerate(known[: self.num_kept]):
            chosen.setdefault(point.level, index)
        weights = [0.0] * len(known)
        for level, index in chosen.items():
            factors = [(at.level - other) / (level - other) for other in chosen if other != level]
            weights[index] = math.prod(factors)
        return weights


@dataclass(frozen=True, slots=True)
class StepTaylor(Extrapolator):
    """TaylorSeer as in its paper, MAX and diffusers: differences in the step number.

    Each difference is divided by the last gap only, although the previous gap may differ.
    """

    @override
    def weights(self, known: Sequence[Point], at: Point) -> list[float]:
        known = known[: self.num_kept]
        unit = np.eye(len(known))
        derivatives = [unit[-1]]
        for index in range(len(known) - 2, -1, -1):
            gap = known[index].step - known[index + 1].step
            fresh = [unit[index]]
            for before in derivatives:
                fresh.append((fresh[-1] - before) / gap)
            derivatives = fresh
        total, factor = np.zeros(len(known)), 1.0
        for degree, derivative in enumerate(derivatives[: self.num_kept]):
            total += factor * derivative
            factor *= (at.step - known[0].step) / (degree + 1)
        return [float(weight) for weight in total]
