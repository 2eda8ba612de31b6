"""A part's module from its configuration and tensors: diffusers' classes, and transformers'.

Owns construction without memory, and the fill. No code of a checkpoint runs: the class is ours to
choose (`classes.py`), its configuration is cut down to plain fields, tensors are safetensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from triptych.core.errors import WeightsError
from triptych.core.weights.quiet import errors_only, without_progress_bar
from triptych.core.weights.tensors.loading import MAX_NAMED, TensorTarget, load_tensors
from triptych.modalities.diffusion.engine.loading.originals import in_own_names, text_in_own_names
from triptych.modalities.diffusion.engine.loading.weights import Weights, unfit

Report = Callable[[float], None]
_CHOOSES_CODE = frozenset({"auto_map", "attn_implementation", "experts_implementation"})


class _WithoutMemory(TorchFunctionMode):
    """Parameters that layers create empty get a shape and no memory. Buffers are computed."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty:
            options["device"] = "meta"
        return func(*args, **options)


def open_diffusers_module(
    kind: Any,
    weights: Weights,
    *,
    device: torch.device,
    dtype: torch.dtype,
    report: Report,
    is_foreign: bool = False,
) -> nn.Module:
    """A model of diffusers with these weights. Raises `WeightsError` naming the tensor.

    What the class computes in float32 in any case stays in it. `is_foreign`: tensors may be named
    as the model was published.
    """
    module: nn.Module = sketch(kind, weights.config)
    if is_foreign and any(t.name not in weights.tensors for t in _targets(module, weights)):
        weights = in_own_names(module, weights)
    allocate(module, device, dtype)
    load_tensors(weights, _targets(module, weights), report=report)
    return module


def sketch(kind: Any, config: Mapping[str, Any]) -> Any:
    """A model of diffusers without memory behind its weights.

    Fields that the class does not have stay readable in its `config`: pipelines look at some.
    """
    fields = _plain(config)
    with (
        unfit(f"config.json is not usable as {kind.__name__}"),
        errors_only("diffusers.configuration_utils"),
        _WithoutMemory(),
    ):
        return kind.from_config(fields).eval().requires_grad_(False)


def num_values(kind: Any, config: Mapping[str, Any]) -> int:
    """How many numbers a part's weights are, by its configuration alone."""
    if is_of_diffusers(kind):
        module = sketch(kind, config)
    else:
        with torch.device("meta"):
            module = kind(transformers_config(kind, config))
    return sum(tensor.numel() for tensor in module.state_dict().values())


def is_of_diffusers(kind: Any) -> bool:
    """Whether a class is diffusers', and not transformers'."""
    return bool(kind.__module__.startswith("diffusers."))


def allocate(module: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Memory for the weights of a sketch, not yet filled; everything else moves to the device."""
    exact = frozenset(module._keep_in_fp32_modules or ())
    state = {
        name: torch.empty(tensor.shape, dtype=_dtype_of(name, tensor, dtype, exact), device=device)
        for name, tensor in module.state_dict().items()
    }
    module.load_state_dict(state, assign=True)
    module.requires_grad_(False).to(device)


def open_transformers_module(
    kind: Any,
    weights: Weights,
    *,
    device: torch.device,
    dtype: torch.dtype,
    report: Report,
    is_foreign: bool = False,
) -> nn.Module:
    """A model of transformers, by its own loading: names have changed with its releases.

    `is_foreign`: it may be a part of a whole checkpoint.
    """
    config = transformers_config(kind, weights.config)
    if is_foreign:
        weights = text_in_own_names(config, weights)
    state = {name: weights.read(name) for name in weights.tensors}
    with unfit(f"The weights are not usable as {kind.__name__}"), without_progress_bar():
        module, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # they are reported, and refused below
            output_loading_info=True,
        )
    _check_complete(info, weights)
    report(1.0)
    moved: nn.Module = module.to(device).eval().requires_grad_(False)
    return moved


def transformers_config(kind: Any, config: Mapping[str, Any]) -> Any:
    """The configuration as the class has it."""
    with unfit(f"config.json is not usable as {kind.__name__}"):
        return kind.config_class.from_dict(_plain(config))


def _dtype_of(name: str, tensor: Tensor, dtype: torch.dtype, exact: frozenset[str]) -> torch.dtype:
    if not tensor.is_floating_point():
        return tensor.dtype
    return torch.float32 if exact & set(name.split(".")) else dtype


def _targets(module: Any, weights: Weights) -> list[TensorTarget]:
    """Where each tensor goes. Names from before diffusers renamed its attention are known to it."""
    names = {name: name for name in weights.tensors}
    module._fix_state_dict_keys_on_load(names)
    return [
        TensorTarget(names.get(name, name), tensor) for name, tensor in module.state_dict().items()
    ]


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without what is private, or chooses code to run."""
    if config.get("quantization_config"):
        raise WeightsError("config.json asks for a quantization_config, which is not supported.")
    return {
        name: _plain(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if not name.startswith("_") and name not in _CHOOSES_CODE
    }


def _check_complete(info: Mapping[str, Any], weights: Weights) -> None:
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[problem]:
            named = ", ".join(sorted(map(str, info[problem]))[:MAX_NAMED])
            files = ", ".join(sorted({t.file for t in weights.tensors.values()})[:MAX_NAMED])
            raise WeightsError(f"{problem.replace('_', ' ')} in {files}: {named}.")
