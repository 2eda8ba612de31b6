"""Plans of the steps to compute: a shortest path over measured errors.

Owns the search. Knows no tensor and no model: its input is `Calibration.gram`.

The error model. Along uncached runs with outputs y_0 .. y_{N-1}, a skipped step k takes a weighted
sum of computed outputs; its error is again a weighted sum of the y, and its effect on the final
sample is that times the sampler's influence of step k (exact, as long as the model is evaluated at
the same points). A run of skips between two computed steps thus has an error vector with
coefficients `a` and length sqrt(a' G a), G the matrix of inner products. The final error is at most
the sum of these lengths over the runs of skips, and the search minimizes this bound.

This leaves out how later steps correct an error: they pull the sample back towards likely images,
so less remains of an earlier error. `damped` models this by a factor of exp(-rate) from pure noise
to none. The rate depends on the model and is found by trials.

The algorithm. A run's length depends on the computed steps its prediction uses: the last
`num_kept`. States are those tuples, edges lead from one computed step to the next, and costs add
up, so the least sum over all plans with a given number of computed steps is found by dynamic
programming over (number computed, state): the optimum, not a heuristic. LeMiCa (Gao et al. 2025)
searches the same graph with edges of its own measure and single reuse; this form needs one
uncached run per sample, whatever the number of edges, and holds for any extrapolation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from triptych.modalities.diffusion.engine.caches.extrapolation import Extrapolator, Point
from triptych.modalities.diffusion.engine.samplers.program import Program, Vector

_State = tuple[int, ...]  # the last computed steps, newest first
_Best = dict[_State, tuple[float, tuple[int, ...]]]  # least cost so far, and the steps that make it


@dataclass(frozen=True, eq=False, kw_only=True)
class ErrorModel:
    """The input of a search: the outputs' inner products, the influence and the noise levels."""

    gram_NN: Vector
    influence_N: Vector
    points: tuple[Point, ...]

    @classmethod
    def of(cls, gram_NN: Vector, program: Program) -> ErrorModel:
        """Combine the products with the sampler of the calibration."""
        points = (Point(k, float(level)) for k, level in enumerate(program.noise_levels_N))
        return cls(gram_NN=gram_NN, influence_N=program.influence, points=tuple(points))

    def damped(self, rate: float) -> ErrorModel:
        """The model in which an error at noise level l shrinks by exp(-rate * l) in the end."""
        levels = np.array([point.level for point in self.points])
        return replace(self, influence_N=self.influence_N * np.exp(-rate * levels))

    def skip_error(self, extrapolator: Extrapolator, known: _State, until: int) -> Vector:
        """Coefficients, over the outputs, of the error that skipping up to `until` makes."""
        total = np.zeros(len(self.points))
        points = [self.points[step] for step in known]
        for step in range(known[0] + 1, until):
            weights = extrapolator.weights(points, self.points[step])
            total[list(known)] += self.influence_N[step] * np.array(weights)
            total[step] -= self.influence_N[step]
        return total

    def length(self, coefficients: Vector) -> float:
        """Root mean square per element of the vector with these coefficients."""
        return math.sqrt(max(0.0, float(coefficients @ self.gram_NN @ coefficients)))


def all_plans(
    measured: ErrorModel,
    extrapolator: Extrapolator,
    max_computed: int,
    *,
    max_skips: int = 8,
) -> dict[int, tuple[bool, ...]]:
    """The plan of least error for every number of computed steps up to `max_computed`.

    The first and the last step compute in all of them. Numbers without a plan of at most
    `max_skips` skips in a row are left out.
    """
    num_steps = len(measured.points)

    @cache
    def cost(known: _State, until: int) -> float:
        return measured.length(measured.skip_error(extrapolator, known, until))

    plans = {}
    best: _Best = {(0,): (0.0, (0,))}
    for num_computed in range(2, max_computed + 1):
        following: _Best = {}
        for known, (so_far, chosen) in best.items():
            for step in range(known[0] + 1, min(known[0] + max_skips + 2, num_steps)):
                state = (step, *known)[: extrapolator.num_kept]
                total = so_far + cost(known, step)
                if state not in following or total < following[state][0]:
                    following[state] = (total, (*chosen, step))
        best = following
        if ends := [found for state, found in best.items() if state[0] == num_steps - 1]:
            computed = min(ends)[1]
            plans[num_computed] = tuple(step in computed for step in range(num_steps))
    return plans


def expected_error(measured: ErrorModel, extrapolator: Extrapolator, plan: Sequence[bool]) -> float:
    """Root mean square error of the final sample, for model evaluations at the same points.

    Uses the error vector of the whole plan, in which runs of skips may cancel or add up; the search
    minimizes only a bound on it.
    """
    computed = [step for step, computes in enumerate(plan) if computes]
    total = np.zeros(len(plan))
    for index, step in enumerate(computed):
        until = computed[index + 1] if index + 1 < len(computed) else len(plan)
        known = tuple(reversed(computed[: index + 1]))[: extrapolator.num_kept]
        assert known[0] == step
        total += measured.skip_error(extrapolator, known, until)
    return measured.length(total)
