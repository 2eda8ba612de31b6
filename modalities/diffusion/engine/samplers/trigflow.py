"""Consistency models that move on a quarter circle from clean sample to noise: Sana Sprint.

A noisy sample is `cos(t) * clean + sin(t) * noise` (Lu and Song 2024, "TrigFlow"). The model was
trained on straight lines before, so it is asked at the place on its line with the same ratio of
noise to signal, and its answer is turned back (Chen et al. 2025, 3.1).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np

from triptych.modalities.diffusion.engine.samplers.program import Columns, Program


def consistency(scheduler: Any, begin: int) -> Program:
    """SCMScheduler: jump to the clean sample, noise it for the next angle.

    In units of the clean samples' deviation, where noise has deviation 1.
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
