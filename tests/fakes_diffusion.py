"""Small stand-ins for image generation: a model in one line, scheduler configurations by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from triptych.modalities.diffusion.cells import CellPools
from triptych.modalities.diffusion.samplers.registry import Spacing
from triptych.modalities.diffusion.samplers.rows import (
    SampleRow,
    advance,
    model_inputs,
    release_row,
    start_row,
)

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
    config: dict[str, Any], num_steps: int, seed: int, pools: CellPools, **extra: Any
) -> SampleRow:
    return start_row(
        noise(seed),
        config,
        Spacing(num_steps=num_steps, **extra),
        generator=torch.Generator().manual_seed(1000 + seed),
        pools=pools,
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
