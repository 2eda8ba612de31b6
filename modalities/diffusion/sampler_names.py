"""Samplers by their common names, for requests that choose one.

Owns the names, and which samplers suit a model: flow-matching models and models that predict noise
take different ones. Knows no torch, because the API lists the names; a sampler is built from the
configuration that `with_sampler` returns.
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
# Settings that distinguish samplers of this class, with their defaults.
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
# Settings of the model's training, which apply to every sampler.
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
    """The names of the samplers that suit a model, from its scheduler_config.json."""
    return tuple(_table(config))


def with_sampler(
    config: Mapping[str, Any], name: str, shift_exponent: float | None = None
) -> Mapping[str, Any]:
    """The configuration of the named sampler for a model whose default is `config`.

    An empty name means the model's default. `shift_exponent`: the shift of noise levels for the
    image's size, if `config` has one. Raises `InvalidRequest` for a name that is unknown, or does
    not suit this model.
    """
    if not name:
        return config
    table = _table(config)
    if name not in table:
        known = any(name in each for each in (_FLOW, _CONSISTENCY, _NOISE))
        reason = "does not suit this model" if known else "is not a known sampler"
        raise InvalidRequest(
            f"Sampler {name} {reason}; its samplers are: {', '.join(table)}.", param="sampler"
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
    """The name, or an empty string for the model's default sampler."""
    is_own = name in _table(config) and with_sampler(config, name) is config
    return "" if is_own else name


def _table(config: Mapping[str, Any]) -> _Table:
    kind = str(config.get("_class_name", ""))
    if kind == "SCMScheduler":
        return _CONSISTENCY
    is_flow = kind.startswith("FlowMatch")
    return _FLOW if is_flow or config.get("use_flow_sigmas") else _NOISE


def _is_own(config: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Whether the model's default sampler has the requested name, whatever its settings."""
    if asked["_class_name"] != config.get("_class_name"):
        return False
    if asked["_class_name"] != _MULTISTEP["_class_name"]:
        return True
    return all(config.get(key, usual) == asked.get(key, usual) for key, usual in _VARIANTS.items())


def _shift(config: Mapping[str, Any], exponent: float | None) -> float:
    """The shift factor of noise levels, which in some models grows with the image size."""
    if config.get("use_dynamic_shifting") and exponent is not None:
        is_linear = config.get("time_shift_type") == "linear"
        return exponent if is_linear else math.exp(exponent)
    return float(config.get("flow_shift") or config.get("shift") or 1.0)
