"""What a model's output means: noise, the clean sample, or a velocity between them.

Owns the conversions, written over coefficient vectors (`program.Columns`). A noisy sample is
`alpha * clean + sigma * noise`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from triptych.modalities.diffusion.engine.samplers.program import Vector


class NoiseLevel(NamedTuple):
    """Signal and noise in a sample: `alpha * clean + sigma * noise`."""

    alpha: float
    sigma: float

    @classmethod
    def variance_preserving(cls, ratio: float) -> NoiseLevel:
        """From the ratio of noise to signal, with alpha² + sigma² = 1."""
        alpha = 1 / math.sqrt(ratio**2 + 1)
        return cls(alpha, ratio * alpha)

    @classmethod
    def flow(cls, sigma: float) -> NoiseLevel:
        """On the straight line from clean sample to noise, alpha + sigma = 1."""
        return cls(1 - sigma, sigma)

    @property
    def log_snr(self) -> float:
        """Half the logarithm of the signal-to-noise ratio, lambda in the papers."""
        if self.sigma == 0:
            return math.inf
        return math.log(self.alpha) - math.log(self.sigma) if self.alpha else -math.inf


def clean_sample(kind: str, sample: Vector, output: Vector, level: NoiseLevel) -> Vector:
    """The clean sample that an output stands for.

    `kind` is the noise scheduler's `prediction_type`; raises `KeyError` for one there is not.
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
    """The noise that an output stands for. Raises `KeyError` like `clean_sample`."""
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
