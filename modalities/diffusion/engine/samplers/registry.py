"""Opens the sampler of a `scheduler_config.json`.

Owns the choice: a `Program` if one computes the same, else diffusers' own scheduler object, for one
row. Noise levels always come from diffusers: there are many ways to space them, and they are
computed once per request.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import diffusers
import numpy as np
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from triptych.core.errors import InvalidRequest, WeightsError
from triptych.modalities.diffusion.engine.samplers.alphas import consistency, ddim, lcm
from triptych.modalities.diffusion.engine.samplers.euler import (
    euler,
    euler_ancestral,
    flow_euler,
    flow_heun,
)
from triptych.modalities.diffusion.engine.samplers.multistep import dpm_solver, unipc
from triptych.modalities.diffusion.engine.samplers.program import Program

_NATIVE: MappingProxyType[str, Callable[[Any, int], Program]] = MappingProxyType(
    {
        "DDIMScheduler": ddim,
        "DPMSolverMultistepScheduler": dpm_solver,
        "EulerAncestralDiscreteScheduler": euler_ancestral,
        "EulerDiscreteScheduler": euler,
        "FlowMatchEulerDiscreteScheduler": flow_euler,
        "FlowMatchHeunDiscreteScheduler": flow_heun,
        "LCMScheduler": lcm,
        "SCMScheduler": consistency,
        "UniPCMultistepScheduler": unipc,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spacing:
    """Number and noise levels of steps; a scheduler ignores what it does not support.

    `sigmas` before shifting, one per step; `timesteps`, if they are not those of the shifted noise
    levels, are what the model is shown with Euler steps of flow matching. `mu` is the exponent of
    the shift for the image's size (`dynamic_shift`), used if the configuration has
    `use_dynamic_shifting`. `begin`: the first step, for a row that begins from an image.
    """

    num_steps: int
    sigmas: Sequence[float] | None = None
    timesteps: Sequence[float] | None = None
    mu: float | None = None
    begin: int = 0


def dynamic_shift(config: Mapping[str, Any], num_tokens: int) -> float:
    """The exponent by which FLUX, Qwen-Image, Z-Image and Lumina 2 shift the noise levels.

    A line through (`base_image_seq_len`, `base_shift`) and (`max_image_seq_len`, `max_shift`): a
    larger image needs more noise to hide the same detail (Esser et al. 2024, 5.3.2).
    """
    short = config.get("base_image_seq_len", 256)
    long = config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (high - low) / (long - short)
    return float(num_tokens * slope + (low - slope * short))


def open_scheduler(config: Mapping[str, Any], spacing: Spacing) -> Any:
    """The scheduler object of this configuration, its noise levels set.

    Raises `WeightsError` for a class unknown to diffusers, `InvalidRequest` for a number of steps
    that the scheduler does not support.
    """
    name = str(config.get("_class_name", ""))
    kind = getattr(diffusers, name, None)
    is_scheduler = isinstance(kind, type) and issubclass(kind, SchedulerMixin)
    if kind is None or not is_scheduler:
        raise WeightsError(f"scheduler_config.json names {name!r}, which is not a noise scheduler.")
    scheduler: Any = kind.from_config(dict(config))
    accepted = inspect.signature(scheduler.set_timesteps).parameters
    arguments: dict[str, Any] = {}
    # UniPC and similar schedulers take noise levels only for flow matching.
    takes_sigmas = "sigmas" in accepted and scheduler.config.get("use_flow_sigmas", True)
    if spacing.sigmas is not None and takes_sigmas:
        arguments["sigmas"] = np.array(spacing.sigmas)
        if spacing.timesteps is not None and name == "FlowMatchEulerDiscreteScheduler":
            arguments["timesteps"] = np.array(spacing.timesteps)
    if spacing.mu is not None and "mu" in accepted and scheduler.config.get("use_dynamic_shifting"):
        arguments["mu"] = spacing.mu
    if "intermediate_timesteps" in accepted and spacing.num_steps != 2:
        arguments["intermediate_timesteps"] = None  # used for two steps only
    if "sigmas" not in arguments:
        arguments["num_inference_steps"] = spacing.num_steps
    refusal = InvalidRequest(
        f"{name} does not support {spacing.num_steps} steps: try another number.", param="steps"
    )
    try:
        with np.errstate(all="ignore"):  # some spacings divide by zero for a single step
            scheduler.set_timesteps(**arguments)
    except (ValueError, ZeroDivisionError, IndexError) as error:
        raise refusal from error
    if not scheduler.timesteps.isfinite().all():
        raise refusal
    if not 0 <= spacing.begin * scheduler.order < len(scheduler.timesteps):
        raise refusal
    return scheduler


def build_program(scheduler: Any, begin: int = 0) -> Program | None:
    """The `Program` of an opened scheduler, or `None` if there is none for it.

    `begin`: the first evaluation, with an empty history.
    """
    native = _NATIVE.get(type(scheduler).__name__)
    return native(scheduler, begin) if native and _is_linear(scheduler.config) else None


def _is_linear(config: Mapping[str, Any]) -> bool:
    """Whether the step is a weighted sum, by an implemented formula."""
    is_flow = config.get("prediction_type") == "flow_prediction"
    return (
        not config.get("thresholding")
        and not config.get("clip_sample")
        and config.get("variance_type") not in {"learned", "learned_range"}
        and config.get("algorithm_type", "dpmsolver++") in {"dpmsolver++", "sde-dpmsolver++"}
        and config.get("lambda_min_clipped", -math.inf) == -math.inf
        and config.get("solver_p") is None
        and is_flow == bool(config.get("use_flow_sigmas", is_flow))
    )
