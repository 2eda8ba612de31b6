"""DDIM, LCM and SCM: samplers whose noise levels come from the timesteps."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from triptych.modalities.diffusion.engine.samplers.program import (
    Columns,
    NoiseLevel,
    Program,
    Vector,
    clean_sample,
    noise,
)

_SIGMA_DATA = 0.5  # of the consistency models on which LCM is based

# One step's clean and next sample, from the present level, the next level, and the index.
_Step = Callable[[Columns, NoiseLevel, NoiseLevel, int], tuple[Vector, Vector]]


def ddim(scheduler: Any, begin: int) -> Program:
    """DDIMScheduler (Song et al. 2020, formula 12), without fresh noise."""
    kind = scheduler.config.prediction_type
    stride = scheduler.config.num_train_timesteps // scheduler.num_inference_steps
    times = [int(time) for time in scheduler.timesteps]

    def step(
        columns: Columns, here: NoiseLevel, after: NoiseLevel, index: int
    ) -> tuple[Vector, Vector]:
        x, v = columns.sample, columns.output
        clean = clean_sample(kind, x, v, here)
        return clean, after.alpha * clean + after.sigma * noise(kind, x, v, here)

    return _program(scheduler, [time - stride for time in times], step)


def lcm(scheduler: Any, begin: int) -> Program:
    """LCMScheduler (Luo et al. 2023): jump to the clean sample, noise it for the next level."""
    config = scheduler.config
    times = [int(time) for time in scheduler.timesteps]

    def step(
        columns: Columns, here: NoiseLevel, after: NoiseLevel, index: int
    ) -> tuple[Vector, Vector]:
        x = columns.sample
        scaled = times[index] * config.timestep_scaling
        square = scaled**2 + _SIGMA_DATA**2
        predicted = clean_sample(config.prediction_type, x, columns.output, here)
        clean = scaled / math.sqrt(square) * predicted + _SIGMA_DATA**2 / square * x
        if index == len(times) - 1:
            return clean, clean
        return clean, after.alpha * clean + after.sigma * columns.noise

    return _program(scheduler, [*times[1:], times[-1]], step)


def _program(scheduler: Any, following: list[int], step: _Step) -> Program:
    columns = Columns(0)
    alphas = scheduler.alphas_cumprod.double().numpy()
    final = float(scheduler.final_alpha_cumprod)
    levels, cleans, steps = [], [], []
    for index, (time, after) in enumerate(zip(scheduler.timesteps, following, strict=True)):
        here = _level(alphas[int(time)])
        clean, sample = step(columns, here, _level(alphas[after] if after >= 0 else final), index)
        levels.append(here)
        cleans.append(clean[[0, 1]])
        steps.append(columns.matrix(sample))
    return Program(
        timesteps_N=scheduler.timesteps.double().numpy(),
        noise_levels_N=np.array([level.sigma for level in levels]),
        input_scales_N=np.ones(len(steps)),
        weights_NSC=np.stack(steps),
        noised_N2=np.array(levels),
        clean_N2=np.stack(cleans),
        initial_scale=float(scheduler.init_noise_sigma),
    )


def _level(alpha_squared: float) -> NoiseLevel:
    return NoiseLevel(math.sqrt(alpha_squared), math.sqrt(1 - alpha_squared))


def consistency(scheduler: Any, begin: int) -> Program:
    """SCMScheduler: jump to the clean sample, noise it for the next angle.

    In units of the clean samples' standard deviation, in which noise has deviation 1.
    """
    columns = Columns(0)
    x, answer, fresh = columns.sample, columns.output, columns.noise
    angles = scheduler.timesteps.double().tolist()
    times, scales, cleans, steps = [], [], [], []
    for angle, after in pairwise(angles):
        signal, noise = math.cos(angle), math.sin(angle)
        time = noise / (signal + noise)
        scale = math.hypot(time, 1 - time)
        velocity = (1 - 2 * time) * x + (1 - 2 * time + 2 * time**2) / scale * answer
        clean = signal * x - noise * velocity
        times.append(time)
        scales.append(scale)
        cleans.append(clean[[0, 1]])
        steps.append(columns.matrix(math.cos(after) * clean + math.sin(after) * fresh))
    return Program(
        timesteps_N=np.array(times),
        noise_levels_N=np.sin(angles[:-1]),
        input_scales_N=np.array(scales),
        weights_NSC=np.stack(steps),
        noised_N2=np.stack([np.cos(angles[:-1]), np.sin(angles[:-1])], axis=1),
        clean_N2=np.stack(cleans),
        initial_scale=1.0,
    )
