"""Our samplers against diffusers' noise schedulers, whole trajectories."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.denoiser_stubs import FOREIGN_CONFIGS, NATIVE_CONFIGS, begin, denoiser, finish, noise
from triptych.modalities.diffusion.engine.samplers.registry import (
    Spacing,
    build_program,
    dynamic_shift,
    open_scheduler,
)
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools


def reference(
    scheduler: Any, sample: Tensor, seed: int, model: Callable[[Tensor, Tensor], Tensor] = denoiser
) -> Tensor:
    sample = sample[None] * getattr(scheduler, "init_noise_sigma", 1.0)
    return _follow(scheduler, sample, scheduler.timesteps, seed, model)


def _follow(
    scheduler: Any,
    sample: Tensor,
    times: Tensor,
    seed: int,
    model: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    takes_noise = "generator" in inspect.signature(scheduler.step).parameters
    extra = {"generator": torch.Generator().manual_seed(1000 + seed)} if takes_noise else {}
    for time in times:
        scaled = sample
        if hasattr(scheduler, "scale_model_input"):
            scaled = scheduler.scale_model_input(sample, time)
        output = model(scaled, time[None])
        sample = scheduler.step(output, time, sample, return_dict=False, **extra)[0]
    return sample[0]


@pytest.mark.parametrize("begin_at", [1, 4])
@pytest.mark.parametrize("name", [*NATIVE_CONFIGS, "deis"])
def test_a_row_may_begin_with_an_image(name: str, begin_at: int) -> None:
    config, clean = {**NATIVE_CONFIGS, **FOREIGN_CONFIGS}[name], noise(8)
    row = begin(config, 7, 3, TensorPools(), first=begin_at, clean=clean)
    scheduler = open_scheduler(config, Spacing(num_steps=7))
    scheduler.set_begin_index = getattr(scheduler, "set_begin_index", lambda index: None)
    begin_at *= scheduler.order
    scheduler.set_begin_index(begin_at)
    times = scheduler.timesteps[begin_at:]
    add = getattr(scheduler, "add_noise", None) or scheduler.scale_noise
    order = {"sample": clean[None], "noise": noise(3)[None], "timestep": times[:1]}
    if add.__name__ == "add_noise":
        order = {"original_samples": clean[None], "noise": noise(3)[None], "timesteps": times[:1]}
    theirs = _follow(scheduler, add(**order), times, 3, denoiser)
    assert distance(finish(row), theirs) < 1e-5


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5, 15, 50])
@pytest.mark.parametrize("name", NATIVE_CONFIGS)
def test_a_row_ends_where_diffusers_ends(name: str, num_steps: int) -> None:
    config = NATIVE_CONFIGS[name]
    row = begin(config, num_steps, 3, TensorPools())
    assert row.program is not None
    theirs = reference(open_scheduler(config, Spacing(num_steps=num_steps)), noise(3), 3)
    # Theirs subtract nearly equal samples in float32 where the noise is lowest or highest.
    is_cancelling = name in {"flow heun", "euler velocity"} and num_steps < 5
    assert distance(finish(row), theirs) < (1e-4 if is_cancelling else 1e-5)


@pytest.mark.parametrize("num_steps", [2, 4, 7, 20, 50])
@pytest.mark.parametrize("name", ["ddim", "ddim velocity", "unipc", "unipc flow", "unipc 3 bh1"])
def test_programs_are_exact_in_double_precision(name: str, num_steps: int) -> None:
    scheduler = open_scheduler(NATIVE_CONFIGS[name], Spacing(num_steps=num_steps))
    for table in ("sigmas", "alphas_cumprod", "final_alpha_cumprod"):
        if hasattr(scheduler, table):
            setattr(scheduler, table, getattr(scheduler, table).double())
    program = build_program(scheduler)
    assert program is not None
    state = np.zeros((program.num_states, noise(5).numel()))
    state[0] = noise(5).double().numpy().ravel() * program.initial_scale
    for step in range(len(program)):
        seen = torch.from_numpy(state[:1] * program.input_scales_N[step]).view(1, *noise(5).shape)
        output = denoiser(seen, torch.tensor([program.timesteps_N[step]])).numpy().reshape(1, -1)
        columns = np.concatenate([state, output, np.zeros_like(output)])
        state = program.weights_NSC[step] @ columns
    theirs = reference(scheduler, noise(5).double(), 5).numpy().ravel()
    assert np.abs(state[0] - theirs).max() / np.abs(theirs).max() < 1e-10


@pytest.mark.parametrize("name", FOREIGN_CONFIGS)
def test_others_run_as_they_are(name: str) -> None:
    config = FOREIGN_CONFIGS[name]
    row = begin(config, 10, 4, TensorPools())
    assert row.program is None
    theirs = reference(open_scheduler(config, Spacing(num_steps=10)), noise(4), 4)
    assert distance(finish(row), theirs) < 1e-6


def test_dynamic_shifting_follows_flux() -> None:
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    config = {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "base_image_seq_len": 256,
        "max_image_seq_len": 4096,
    }
    for num_tokens in (64, 1024, 4096, 9000):
        mu = dynamic_shift(config, num_tokens)
        assert mu == pytest.approx(calculate_shift(num_tokens))
        sigmas = np.linspace(1.0, 1 / 8, 8)
        row = begin(config, 8, 1, TensorPools(), sigmas=sigmas, mu=mu)
        scheduler = open_scheduler(config, Spacing(num_steps=8, sigmas=tuple(sigmas), mu=mu))
        assert distance(finish(row), reference(scheduler, noise(1), 1)) < 1e-5
