"""DPM-Solver++ and UniPC: samplers that keep the model's outputs of earlier steps.

Both work in lambda, half the log of the signal-to-noise ratio, where the exact solution of the
linear part is known and only the model's part is approximated by a polynomial.
"""

from __future__ import annotations

import math
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


def dpm_solver(scheduler: Any, begin: int) -> Program:
    """DPMSolverMultistepScheduler, `dpmsolver++` of order 1 to 3 (Lu et al. 2022), and its SDE."""
    config = scheduler.config
    order, count = config.solver_order, len(scheduler.timesteps)
    columns = Columns(order - 1)
    levels = _levels(scheduler)
    is_short = count < 15 and config.lower_order_final
    ends_first = config.euler_at_final or is_short or config.final_sigmas_type == "zero"
    cleans, steps = [], []
    for index in range(count):
        clean = clean_sample(config.prediction_type, columns.sample, columns.output, levels[index])
        usable = min(order, max(1, index + 1 - begin))
        if index == count - 1 and ends_first:
            usable = 1
        elif index == count - 2 and is_short:
            usable = min(usable, 2)
        recent = [clean, *columns.history][:usable]
        around = levels[max(0, index + 1 - usable) : index + 2]
        sample = _dpm_step(config, columns, recent, around)
        steps.append(columns.matrix(sample, [clean, *columns.history][: order - 1]))
        cleans.append(clean)
    return _program(scheduler, levels, cleans, steps)


def _dpm_step(
    config: Any, columns: Columns, recent: list[Vector], around: list[NoiseLevel]
) -> Vector:
    """The next sample from the last clean samples, newest first, and their levels, oldest first."""
    *_, here, after = around
    h = after.log_snr - here.log_snr
    if h == 0:  # some spacings repeat the last noise level
        return columns.sample
    is_sde = config.algorithm_type == "sde-dpmsolver++"
    k = 2.0 if is_sde else 1.0  # the noise makes the sample forget twice as fast
    decay = math.exp(-k * h)
    shrink = after.sigma / here.sigma * (math.exp(-h) if is_sde else 1.0)
    sample = shrink * columns.sample + after.alpha * (1 - decay) * recent[0]
    if is_sde:
        sample = sample + after.sigma * math.sqrt(1 - decay) * columns.noise
    if len(recent) == 1:
        return sample
    slope, curve = _differences(recent, around, h)
    heun = 1 - (1 - decay) / (k * h)
    if len(recent) == 2:
        weight = (1 - decay) / 2 if config.solver_type == "midpoint" else heun
        return sample + after.alpha * weight * slope
    third = (1 - decay - k * h) / (k * h) ** 2 - 0.5 if is_sde else 0.5 - (decay - 1 + h) / h**2
    return sample + after.alpha * (heun * slope + third * curve)


def _differences(recent: list[Vector], around: list[NoiseLevel], h: float) -> tuple[Vector, Vector]:
    """First and second derivative of the clean sample in lambda, in units of the step `h`."""
    lambdas = [level.log_snr for level in reversed(around[:-1])]
    r0 = (lambdas[0] - lambdas[1]) / h
    slope = (recent[0] - recent[1]) / r0
    if len(recent) == 2:
        return slope, np.zeros_like(slope)
    r1 = (lambdas[1] - lambdas[2]) / h
    earlier = (recent[1] - recent[2]) / r1
    curve = (slope - earlier) / (r0 + r1)
    return slope + r0 * curve, curve


def unipc(scheduler: Any, begin: int) -> Program:
    """UniPCMultistepScheduler (Zhao et al. 2023): a predictor, corrected once the output is known.

    The history: the last outputs, newest first, and the sample before the last prediction.
    """
    config = scheduler.config
    order, count = config.solver_order, len(scheduler.timesteps)
    columns = Columns(order + 1)
    *history, origin = columns.history
    levels = _levels(scheduler)
    read = clean_sample if config.predict_x0 else noise
    cleans, steps, last_order = [], [], 0
    for index in range(count):
        output = read(config.prediction_type, columns.sample, columns.output, levels[index])
        sample = columns.sample
        if index > begin and index - 1 not in config.disable_corrector:
            known = [output, *history[:last_order]]
            sample = _unipc_step(config, origin, known, levels[: index + 1], corrects=True)
        last_order = min(order, max(1, index + 1 - begin))
        if config.lower_order_final:
            last_order = min(last_order, count - index)
        known = [output, *history[: last_order - 1]]
        predicted = _unipc_step(config, sample, known, levels[: index + 2], corrects=False)
        steps.append(columns.matrix(predicted, [output, *history[: order - 1], sample]))
        cleans.append(
            clean_sample(config.prediction_type, columns.sample, columns.output, levels[index])
        )
    return _program(scheduler, levels, cleans, steps)


def _unipc_step(
    config: Any, begin: Vector, known: list[Vector], levels: list[NoiseLevel], *, corrects: bool
) -> Vector:
    """Step from the second-last level to the last; `known` outputs newest first.

    The corrector's newest output is at the last level, the predictor's at the second-last.
    """
    *earlier, here, after = levels
    h = after.log_snr - here.log_snr
    hh = -h if config.predict_x0 else h
    at_after, outputs = (known[:1], known[1:]) if corrects else ([], known)
    order = len(outputs)
    ratios = [(level.log_snr - here.log_snr) / h for level in earlier[::-1][: order - 1]]
    slopes = [(output - outputs[0]) / r for output, r in zip(outputs[1:], ratios, strict=True)]
    slopes += [output - outputs[0] for output in at_after]
    to_signal, to_noise = after.alpha, after.sigma
    if not config.predict_x0:
        to_signal, to_noise = to_noise, to_signal
    begin_scale = to_noise / (here.sigma if config.predict_x0 else here.alpha)
    grown = math.expm1(hh)
    scale = hh if config.solver_type == "bh1" else grown
    sample = begin_scale * begin - to_signal * grown * outputs[0]
    for weight, slope in zip(_unipc_weights(ratios, hh, scale, corrects), slopes, strict=True):
        sample = sample - to_signal * scale * weight * slope
    return sample


def _unipc_weights(ratios: list[float], hh: float, scale: float, corrects: bool) -> Vector:
    """Weights of the slopes: the moments of the exponential integral matched, order by order."""
    size = len(ratios) + corrects
    if size <= 1:
        return np.full(size, 0.5)  # the authors' simplification for the lowest order
    nodes = np.array([*ratios, 1.0][:size])
    phi, factorial, moments = math.expm1(hh) / hh - 1, 1, []
    for degree in range(1, size + 1):
        moments.append(phi * factorial / scale)
        factorial *= degree + 1
        phi = phi / hh - 1 / factorial
    return np.linalg.solve(np.vander(nodes, size, increasing=True).T, np.array(moments))


def _levels(scheduler: Any) -> list[NoiseLevel]:
    is_flow = scheduler.config.use_flow_sigmas
    make = NoiseLevel.flow if is_flow else NoiseLevel.variance_preserving
    return [make(float(sigma)) for sigma in scheduler.sigmas]


def _program(
    scheduler: Any, levels: list[NoiseLevel], cleans: list[Vector], steps: list[Vector]
) -> Program:
    return Program(
        timesteps_N=scheduler.timesteps.double().numpy(),
        noise_levels_N=np.array([level.sigma for level in levels[:-1]]),
        input_scales_N=np.ones(len(steps)),
        weights_NSC=np.stack(steps),
        noised_N2=np.array(levels[:-1]),
        clean_N2=np.stack([clean[[0, -2]] for clean in cleans]),
        initial_scale=float(scheduler.init_noise_sigma),
    )
