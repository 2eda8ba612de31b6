"""Samplers by the names people know them by, for a request that asks for another than the model's.

Owns the names, and which of them suit a model: samplers that follow straight lines suit flow
matching, the older kind suits models that predict noise. Knows no torch, so that
the API lists them; a sampler itself is made of the configuration that `with_sampler` returns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from triptych.core.errors import InvalidRequest

_Table = MappingProxyType[str, Mapping[str, Any]]
_MULTISTEP = {"_class_name": "DPMSolverMultistepScheduler"}
_SDE = {"algorithm_type": "sde-dpmsolver++"}
# What distinguishes samplers of that class, with its usual values.
_VARIANTS = {"algorithm_type": "dpmsolver++", "solver_order": 2, "use_karras_sigmas": False}
_FLOW_SIGMAS = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}

_FLOW: _Table = MappingProxyType(
    {
        "euler": {"_class_name": "FlowMatchEulerDiscreteScheduler"},
        "heun": {"_class_name": "FlowMatchHeunDiscreteScheduler"},
        "dpm++2m": {**_MULTISTEP, **_FLOW_SIGMAS},
        "dpm++2m-sde": {**_MULTISTEP, **_FLOW_SIGMAS, **_SDE},
        "dpm++3m": {**_MULTISTEP, **_FLOW_SIGMAS, "solver_order": 3},
        "unipc": {"_class_name": "UniPCMultistepScheduler", **_FLOW_SIGMAS},
    }
)
_CONSISTENCY: _Table = MappingProxyType({"scm": {"_class_name": "SCMScheduler"}})
_NOISE: _Table = MappingProxyType(
    {
        "ddim": {"_class_name": "DDIMScheduler", "clip_sample": False, "set_alpha_to_one": False},
        "dpm++2m": _MULTISTEP,
        "dpm++2m-karras": {**_MULTISTEP, "use_karras_sigmas": True},
        "dpm++2m-sde": {**_MULTISTEP, **_SDE},
        "dpm++3m": {**_MULTISTEP, "solver_order": 3},
        "euler": {"_class_name": "EulerDiscreteScheduler"},
        "euler-ancestral": {"_class_name": "EulerAncestralDiscreteScheduler"},
        "heun": {"_class_name": "HeunDiscreteScheduler"},
        "lcm": {"_class_name": "LCMScheduler"},
        "unipc": {"_class_name": "UniPCMultistepScheduler"},
    }
)
# How the model was trained, which holds for every sampler.
_TRAINED = frozenset(
    {
        "beta_end",
        "beta_schedule",
        "beta_start",
        "num_train_timesteps",
        "prediction_type",
        "rescale_betas_zero_snr",
        "steps_offset",
        "timestep_spacing",
        "trained_betas",
    }
)


def sampler_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The samplers that suit a model, by its scheduler_config.json."""
    return tuple(_table(config))


def with_sampler(
    config: Mapping[str, Any], name: str, shift_exponent: float | None = None
) -> Mapping[str, Any]:
    """The configuration of the sampler of this name for the model whose own is `config`.

    An empty name is the model's own. `shift_exponent`: how far the noise levels are shifted for
    the image's size, where `config` says that they are. Raises `InvalidRequest` for a name that
    is unknown, or does not suit this model.
    """
    if not name:
        return config
    table = _table(config)
    if name not in table:
        known = any(name in each for each in (_FLOW, _CONSISTENCY, _NOISE))
        reason = "cannot generate with this model" if known else "is no sampler here"
        raise InvalidRequest(
            f"{name} {reason}; these are its samplers: {', '.join(table)}.", param="sampler"
        )
    asked = table[name]
    if _is_own(config, asked):
        return config
    if table is _FLOW:
        shift = "shift" if asked["_class_name"].startswith("FlowMatch") else "flow_shift"
        trained = {"num_train_timesteps": config.get("num_train_timesteps", 1000)}
        trained[shift] = _shift(config, shift_exponent)
    else:
        trained = {key: value for key, value in config.items() if key in _TRAINED}
    return {**trained, **asked}


def short_name(config: Mapping[str, Any], name: str) -> str:
    """The name, or nothing where it is that of the model's own sampler."""
    is_own = name in _table(config) and with_sampler(config, name) is config
    return "" if is_own else name


def _table(config: Mapping[str, Any]) -> _Table:
    kind = str(config.get("_class_name", ""))
    if kind == "SCMScheduler":
        return _CONSISTENCY
    is_flow = kind.startswith("FlowMatch")
    return _FLOW if is_flow or config.get("use_flow_sigmas") else _NOISE


def _is_own(config: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Whether the model's own sampler goes by the name asked for, however it is set up."""
    if asked["_class_name"] != config.get("_class_name"):
        return False
    if asked["_class_name"] != _MULTISTEP["_class_name"]:
        return True
    return all(config.get(key, usual) == asked.get(key, usual) for key, usual in _VARIANTS.items())


def _shift(config: Mapping[str, Any], exponent: float | None) -> float:
    """What noise levels are shifted by: a factor, which some models raise with the size."""
    if config.get("use_dynamic_shifting") and exponent is not None:
        is_linear = config.get("time_shift_type") == "linear"
        return exponent if is_linear else math.exp(exponent)
    return float(config.get("flow_shift") or config.get("shift") or 1.0)
