"""Small stand-ins for image generation: a model in one line, scheduler configurations by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from triptych.modalities.diffusion.engine.caches.extrapolation import Point
from triptych.modalities.diffusion.engine.caches.row_cache import (
    RowCache,
    distances,
    keep_signals,
    predict,
    record,
)
from triptych.modalities.diffusion.engine.samplers.registry import Spacing
from triptych.modalities.diffusion.engine.samplers.rows import (
    SampleRow,
    advance,
    model_inputs,
    release_row,
    start_row,
)
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools

Denoiser = Callable[[Tensor, Tensor], Tensor]  # samples [R, ...], timesteps [R]

_FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
NATIVE_CONFIGS: dict[str, dict[str, Any]] = {
    "flow euler": {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
    "flow euler stochastic": {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "stochastic_sampling": True,
    },
    "flow euler karras": {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "use_karras_sigmas": True,
    },
    "flow heun": {"_class_name": "FlowMatchHeunDiscreteScheduler", "shift": 3.0},
    "euler": {"_class_name": "EulerDiscreteScheduler", "beta_schedule": "scaled_linear"},
    "euler velocity": {
        "_class_name": "EulerDiscreteScheduler",
        "prediction_type": "v_prediction",
        "timestep_spacing": "trailing",
    },
    "euler ancestral": {"_class_name": "EulerAncestralDiscreteScheduler"},
    "ddim": {"_class_name": "DDIMScheduler", "clip_sample": False},
    "ddim velocity": {
        "_class_name": "DDIMScheduler",
        "clip_sample": False,
        "prediction_type": "v_prediction",
        "timestep_spacing": "trailing",
        "set_alpha_to_one": False,
    },
    "lcm": {"_class_name": "LCMScheduler", "beta_schedule": "scaled_linear"},
    "dpm++ 2m": {"_class_name": "DPMSolverMultistepScheduler"},
    "dpm++ 2m karras": {
        "_class_name": "DPMSolverMultistepScheduler",
        "use_karras_sigmas": True,
    },
    "dpm++ 2m heun": {
        "_class_name": "DPMSolverMultistepScheduler",
        "solver_type": "heun",
        "final_sigmas_type": "sigma_min",
    },
    "dpm++ 3m": {"_class_name": "DPMSolverMultistepScheduler", "solver_order": 3},
    "dpm++ 2m sde": {
        "_class_name": "DPMSolverMultistepScheduler",
        "algorithm_type": "sde-dpmsolver++",
        "euler_at_final": True,
    },
    "dpm++ 3m sde": {
        "_class_name": "DPMSolverMultistepScheduler",
        "algorithm_type": "sde-dpmsolver++",
        "solver_order": 3,
    },
    "dpm++ 2m flow": {"_class_name": "DPMSolverMultistepScheduler", **_FLOW},
    "unipc": {"_class_name": "UniPCMultistepScheduler"},
    "unipc flow": {"_class_name": "UniPCMultistepScheduler", **_FLOW},
    "unipc 3 bh1": {
        "_class_name": "UniPCMultistepScheduler",
        "solver_order": 3,
        "solver_type": "bh1",
        "disable_corrector": [1, 4],
        "final_sigmas_type": "sigma_min",
    },
    "unipc noise": {
        "_class_name": "UniPCMultistepScheduler",
        "predict_x0": False,
        "final_sigmas_type": "sigma_min",
        "lower_order_final": False,
    },
}
FOREIGN_CONFIGS: dict[str, dict[str, Any]] = {
    "ddim clipped": {"_class_name": "DDIMScheduler", "clip_sample": True},
    "deis": {"_class_name": "DEISMultistepScheduler"},
    "heun": {"_class_name": "HeunDiscreteScheduler"},
    "pndm": {"_class_name": "PNDMScheduler", "skip_prk_steps": True},
    "ddpm": {"_class_name": "DDPMScheduler"},
}


def noise(seed: int, shape: Sequence[int] = (3, 4, 5)) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def denoiser(samples: Tensor, timesteps: Tensor) -> Tensor:
    """Nonlinear, smooth, and every row by itself."""
    times = timesteps.view(-1, *[1] * (samples.ndim - 1)).to(samples.dtype) / 1000
    return torch.tanh(0.7 * samples + times) - 0.3 * samples.roll(1, -1)


def begin(
    config: dict[str, Any],
    num_steps: int,
    seed: int,
    pools: TensorPools,
    *,
    first: int = 0,
    clean: Tensor | None = None,
    **extra: Any,
) -> SampleRow:
    return start_row(
        noise(seed),
        config,
        Spacing(num_steps=num_steps, begin=first, **extra),
        generator=torch.Generator().manual_seed(1000 + seed),
        pools=pools,
        clean=clean,
    )


def step(rows: Sequence[SampleRow], model: Denoiser = denoiser) -> None:
    times = torch.tensor([row.timesteps[row.step] for row in rows])
    advance(rows, model(model_inputs(rows), times))


def finish(row: SampleRow, model: Denoiser = denoiser) -> Tensor:
    while not row.is_done:
        step([row], model)
    sample = row.sample
    release_row(row)
    return sample


class MixtureFlow:
    """The exact velocity of flow matching from noise to a mixture of Gaussians: a true model.

    Nonlinear in the sample and the time like a trained one, and known in closed form.
    """

    def __init__(self, shape: Sequence[int] = (3, 4, 5), num_modes: int = 6, width: float = 0.3):
        self.means_KD = torch.randn(
            num_modes, math.prod(shape), generator=torch.Generator().manual_seed(0)
        ).double()
        self.width = width
        self.num_calls = 0

    def __call__(self, samples: Tensor, timesteps: Tensor) -> Tensor:
        self.num_calls += len(samples)
        x_RD = samples.double().flatten(1)
        sigma = (timesteps.double() / 1000).clamp(1e-3, 1)[:, None]
        alpha = 1 - sigma
        variance = (alpha * self.width) ** 2 + sigma**2
        from_means = x_RD[:, None] - alpha[..., None] * self.means_KD
        share_RK = torch.softmax(-from_means.square().sum(-1) / (2 * variance), dim=1)
        shrink = alpha * self.width**2 / variance
        clean_RKD = self.means_KD + shrink[..., None] * from_means
        clean_RD = (share_RK[..., None] * clean_RKD).sum(1)
        velocity_RD = (x_RD - alpha * clean_RD) / sigma - clean_RD
        return velocity_RD.view(samples.shape).to(samples.dtype)


def cached_step(
    rows: Sequence[tuple[SampleRow, RowCache]], model: Denoiser, signals: Tensor | None = None
) -> list[bool]:
    """One step of rows with caches of the output: who decides to, computes, in one batch."""
    at = [Point(row.step, row.noise_levels[row.step]) for row, _ in rows]
    slots = [slot for _, slot in rows]
    apart = distances(slots, signals) if signals is not None else [math.inf] * len(rows)
    computes = [
        slot.decisions.decide(point.step, d)
        for slot, point, d in zip(slots, at, apart, strict=True)
    ]
    if signals is not None:
        keep_signals(slots, signals, at, computes)
    outputs = torch.empty_like(model_inputs([row for row, _ in rows]))
    run = [index for index, wanted in enumerate(computes) if wanted]
    skip = [index for index, wanted in enumerate(computes) if not wanted]
    if run:
        times = torch.tensor([rows[index][0].timesteps[at[index].step] for index in run])
        outputs[run] = model(model_inputs([rows[index][0] for index in run]), times)
        record([slots[index] for index in run], outputs[run], [at[index] for index in run])
    if skip:
        outputs[skip] = predict([slots[index] for index in skip], [at[index] for index in skip])
    advance([row for row, _ in rows], outputs)
    return computes
