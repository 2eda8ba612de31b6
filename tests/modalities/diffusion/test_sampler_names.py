"""Samplers asked for by name: which a model has, and what becomes of its own settings."""

from __future__ import annotations

import math
from typing import Any

import diffusers
import pytest
import torch

from support.denoiser_stubs import begin, finish
from triptych.core.errors import InvalidRequest
from triptych.modalities.diffusion.engine.samplers.registry import Spacing, open_scheduler
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools
from triptych.modalities.diffusion.sampler_names import sampler_names, short_name, with_sampler

# As published: Stable Diffusion 1.5, FLUX.1, SD3 and Sana.
NOISE: dict[str, Any] = {
    "_class_name": "PNDMScheduler",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
}
DYNAMIC: dict[str, Any] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
STATIC: dict[str, Any] = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
MULTISTEP: dict[str, Any] = {
    "_class_name": "DPMSolverMultistepScheduler",
    "flow_shift": 3.0,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
}
OWN = {
    "euler": STATIC,
    "dpm++2m": MULTISTEP,
    "ddim": {"_class_name": "DDIMScheduler", "clip_sample": True},
}


def test_a_model_has_the_samplers_of_its_training() -> None:
    assert sampler_names(STATIC) == sampler_names(MULTISTEP)
    assert set(sampler_names(STATIC)) == {
        *("euler", "heun", "unipc"),
        *("dpm++2m", "dpm++2m-sde", "dpm++3m"),
    }
    assert {"ddim", "lcm", "euler-ancestral", "heun"} <= set(sampler_names(NOISE))


@pytest.mark.parametrize(("name", "config"), OWN.items())
def test_no_name_and_its_own_leave_a_model_as_it_is(name: str, config: dict[str, Any]) -> None:
    assert with_sampler(config, "") is config
    assert with_sampler(config, name) is config
    assert short_name(config, name) == ""
    assert short_name(config, "unipc") == "unipc"


@pytest.mark.parametrize("config", [NOISE, DYNAMIC, STATIC, MULTISTEP])
def test_every_sampler_generates_to_the_end(config: dict[str, Any]) -> None:
    for name in sampler_names(config):
        row = begin(dict(with_sampler(config, name, 0.7)), 5, 3, TensorPools(), mu=0.7)
        assert finish(row).isfinite().all()


@pytest.mark.parametrize("name", sampler_names(NOISE))
def test_what_the_model_learned_stays(name: str) -> None:
    ours = with_sampler(NOISE, name)
    kind = getattr(diffusers, ours["_class_name"])
    asked = {key: value for key, value in ours.items() if key != "_class_name"}
    theirs = kind.from_config(NOISE, **{key: asked[key] for key in asked.keys() - NOISE.keys()})
    theirs.set_timesteps(7)
    opened = open_scheduler(ours, Spacing(num_steps=7))
    assert torch.equal(opened.timesteps, theirs.timesteps)
    for levels in ("sigmas", "alphas_cumprod"):
        if hasattr(theirs, levels):
            assert torch.equal(getattr(opened, levels), getattr(theirs, levels))


@pytest.mark.parametrize(
    ("config", "shift"),
    [
        (STATIC, 3.0),
        (MULTISTEP, 3.0),
        (DYNAMIC, math.exp(0.9)),
        ({**DYNAMIC, "time_shift_type": "linear"}, 0.9),
    ],
)
@pytest.mark.parametrize("name", ["heun", "dpm++3m", "unipc"])
def test_noise_levels_stay_shifted(name: str, config: dict[str, Any], shift: float) -> None:
    opened = open_scheduler(with_sampler(config, name, 0.9), Spacing(num_steps=500, mu=0.9))
    middle = float(opened.sigmas[len(opened.sigmas) // 2])
    assert middle == pytest.approx(shift / (shift + 1), abs=0.01)


@pytest.mark.parametrize(
    ("config", "name", "message"),
    [
        (STATIC, "ddim", "ddim does not suit this model; its samplers are: euler, heun"),
        (NOISE, "sampler-9", "sampler-9 is not a known sampler; its samplers are: ddim"),
    ],
)
def test_others_are_refused_by_name(config: dict[str, Any], name: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        with_sampler(config, name)
