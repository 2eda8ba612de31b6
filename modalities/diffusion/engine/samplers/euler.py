"""Euler and Heun steps along the noise levels, for flow matching and older models.

Flow matching: the output is the velocity from clean sample to noise, the sample lies on the line
between them (Lipman et al. 2022; Liu et al. 2022). The older form (Karras et al. 2022) carries the
sample at `clean + sigma * noise` and scales it before the model sees it.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np

from triptych.modalities.diffusion.engine.samplers.program import (
    Columns,
    NoiseLevel,
    Program,
    Vector,
    clean_sample,
)


def flow_euler(scheduler: Any, begin: int) -> Program:
    """FlowMatchEulerDiscreteScheduler; with `stochastic_sampling`, fresh noise at every step."""
    columns = Columns(0)
    x, v, fresh = columns.sample, columns.output, columns.noise
    sigmas = scheduler.sigmas.double().numpy()
    steps = []
    for sigma, after in pairwise(sigmas):
        if scheduler.config.stochastic_sampling:
            clean = x - sigma * v
            steps.append(columns.matrix((1 - after) * clean + after * fresh))
        else:
            steps.append(columns.matrix(x + (after - sigma) * v))
    return _flow_program(scheduler, sigmas[:-1], steps)


def flow_heun(scheduler: Any, begin: int) -> Program:
    """FlowMatchHeunDiscreteScheduler: every step except the last averages two slopes.

    Two evaluations per step. The history between them: the step's first sample and its slope.
    """
    columns = Columns(2)
    x, v, (origin, slope) = columns.sample, columns.output, columns.history
    sigmas = scheduler.sigmas.double().numpy()
    levels, steps = [], []
    for index in range(len(sigmas) - 1):
        if index % 2 == 0:
            ahead = x + (sigmas[index + 1] - sigmas[index]) * v
            levels.append(sigmas[index])
            steps.append(columns.matrix(ahead, (x, v)))
        else:
            corrected = origin + (sigmas[index] - sigmas[index - 1]) * (slope + v) / 2
            levels.append(sigmas[index])
            steps.append(columns.matrix(corrected, (origin, slope)))
    return _flow_program(scheduler, np.array(levels), steps)


def euler(scheduler: Any, begin: int) -> Program:
    """EulerDiscreteScheduler, without churn."""
    return _karras_program(scheduler, ancestral=False)


def euler_ancestral(scheduler: Any, begin: int) -> Program:
    """EulerAncestralDiscreteScheduler: step past the next level, then add noise up to it."""
    return _karras_program(scheduler, ancestral=True)


def _flow_program(scheduler: Any, sigmas: Vector, steps: list[Vector]) -> Program:
    count = len(steps)
    return Program(
        timesteps_N=scheduler.timesteps.double().numpy(),
        noise_levels_N=sigmas,
        input_scales_N=np.ones(count),
        weights_NSC=np.stack(steps),
        noised_N2=np.stack([1 - sigmas, sigmas], axis=1),
        clean_N2=np.stack([np.ones(count), -sigmas], axis=1),
        initial_scale=1.0,
    )


def _karras_program(scheduler: Any, *, ancestral: bool) -> Program:
    columns = Columns(0)
    x, fresh = columns.sample, columns.noise
    sigmas = scheduler.sigmas.double().numpy()
    cleans, steps = [], []
    for sigma, after in pairwise(sigmas):
        level = NoiseLevel.variance_preserving(sigma)
        # The model sees the sample scaled to unit variance; its output is read at that scale.
        seen = x * level.alpha
        clean = clean_sample(scheduler.config.prediction_type, seen, columns.output, level)
        up = math.sqrt(after**2 * (sigma**2 - after**2) / sigma**2) if ancestral else 0.0
        down = math.sqrt(after**2 - up**2)
        steps.append(columns.matrix(x + (down - sigma) * (x - clean) / sigma + up * fresh))
        cleans.append(clean[[0, 1]])
    scales = 1 / np.sqrt(sigmas[:-1] ** 2 + 1)
    return Program(
        timesteps_N=scheduler.timesteps.double().numpy(),
        noise_levels_N=sigmas[:-1] * scales,
        input_scales_N=scales,
        weights_NSC=np.stack(steps),
        noised_N2=np.stack([np.ones(len(steps)), sigmas[:-1]], axis=1),
        clean_N2=np.stack(cleans),
        initial_scale=float(scheduler.init_noise_sigma),
    )
