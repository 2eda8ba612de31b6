r"""A sampler as a table of small matrices.

Owns the common form of samplers. Knows no particular one, and no tensor.

Euler, Heun, DPM-Solver, UniPC, DDIM and LCM differ in their formulas, but one step of each is
linear in the same few tensors: the sample, the sampler's history, the model's output and fresh
noise. So a sampler is a matrix per step, computed once, in float64, from the noise levels:

    (sample', history') = weights[step] @ (sample, history, output, noise)

The formulas stay readable, because a sampler writes them over unit vectors (`Columns`): a quantity
is the vector of its coefficients. Rows with different samplers, steps and settings then advance in
one batch, each by its own matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


class Columns:
    """The unit vectors of a step, over which a sampler's formulas are written."""

    def __init__(self, num_history: int) -> None:
        self.sample, *self.history, self.output, self.noise = np.eye(num_history + 3)

    def matrix(self, sample: Vector, history: Sequence[Vector] = ()) -> Vector:
        """One step's weights: the new sample and each new history tensor."""
        assert len(history) == len(self.history)
        return np.stack([sample, *history])


@dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """One row's trajectory: N evaluations of the model, H history tensors.

    Legend: N evaluations, S = 1 + H states, C = S + 2 columns (states, output, noise).
    """

    timesteps_N: Vector  # passed to the model, in the noise scheduler's unit
    noise_levels_N: Vector  # share of noise in the sample, 1 pure noise: where caches extrapolate
    input_scales_N: Vector  # factor on the sample before the model sees it
    weights_NSC: Vector
    noised_N2: Vector  # a clean sample noised for a step: coefficients of (clean, unit noise)
    clean_N2: Vector  # the clean sample expected at a step: coefficients of (sample, output)
    initial_scale: float  # standard deviation of the noise to start from

    def __len__(self) -> int:
        return len(self.timesteps_N)

    @property
    def num_states(self) -> int:
        """The number of states: the sample and its history."""
        return len(self.weights_NSC[0])

    def needs_noise(self, step: int) -> bool:
        """Whether fresh noise enters at this step."""
        return self._are_noisy[step]

    @cached_property
    def _are_noisy(self) -> list[bool]:
        return [bool(weights_SC[:, -1].any()) for weights_SC in self.weights_NSC]

    @cached_property
    def influence(self) -> Vector:
        """The weight of each output in the final sample.

        Exact for given outputs: the final sample is their sum with these weights, plus a multiple
        of the first sample and of the noise.
        """
        influence = np.empty(len(self))
        to_final_S = np.eye(self.num_states)[0]
        for step in range(len(self) - 1, -1, -1):
            through_C = to_final_S @ self.weights_NSC[step]
            influence[step] = through_C[-2]
            to_final_S = through_C[:-2]
        return influence


class NoiseLevel(NamedTuple):
    """Signal and noise in a sample: `alpha * clean + sigma * noise`."""

    alpha: float
    sigma: float

    @classmethod
    def variance_preserving(cls, ratio: float) -> NoiseLevel:
        """The level with this ratio of noise to signal, and alpha² + sigma² = 1."""
        alpha = 1 / math.sqrt(ratio**2 + 1)
        return cls(alpha, ratio * alpha)

    @classmethod
    def flow(cls, sigma: float) -> NoiseLevel:
        """The level on the line from clean sample to noise, alpha + sigma = 1."""
        return cls(1 - sigma, sigma)

    @property
    def log_snr(self) -> float:
        """Half the logarithm of the signal-to-noise ratio, lambda in the papers."""
        if self.sigma == 0:
            return math.inf
        return math.log(self.alpha) - math.log(self.sigma) if self.alpha else -math.inf


def clean_sample(kind: str, sample: Vector, output: Vector, level: NoiseLevel) -> Vector:
    """The clean sample that an output predicts.

    `kind` is the noise scheduler's `prediction_type`; raises `KeyError` for an unknown one.
    """
    alpha, sigma = level
    match kind:
        case "epsilon":
            return (sample - sigma * output) / alpha
        case "sample":
            return output
        case "v_prediction":
            return alpha * sample - sigma * output
        case "flow_prediction":
            return sample - sigma * output
    raise KeyError(kind)


def noise(kind: str, sample: Vector, output: Vector, level: NoiseLevel) -> Vector:
    """The noise that an output predicts. Raises `KeyError` like `clean_sample`."""
    alpha, sigma = level
    match kind:
        case "epsilon":
            return output
        case "sample":
            return (sample - alpha * output) / sigma
        case "v_prediction":
            return alpha * output + sigma * sample
        case "flow_prediction":
            return sample + (1 - sigma) * output
    raise KeyError(kind)
