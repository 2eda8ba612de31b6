"""Builds a part's module of diffusers or transformers from its configuration and tensors.

Owns construction without memory, and filling with plain weights, blocks of integers or float8. No
code of a checkpoint runs: `classes.py` chooses the class, configurations are reduced to plain
fields, and tensors are safetensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from triptych.core.block_formats import FLOAT8_ROWS
from triptych.core.errors import WeightsError
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.packed_linear import HeldWeight
from triptych.core.runtime.kernels.triton.units import multiplies_float8
from triptych.core.runtime.layers.block_layers import (
    BlockDevice,
    BlockPlace,
    block_places,
    hold_blocks,
)
from triptych.core.runtime.tensors.checkpoint import TensorSource
from triptych.core.runtime.tensors.loading import TensorTarget, load_tensors
from triptych.core.runtime.tensors.quantize import quantize_blocks, quantize_float8
from triptych.core.runtime.tensors.quiet import errors_only, transformers_loading
from triptych.core.runtime.tensors.whole import check_complete
from triptych.core.weights.encoding import AUTO, FLOAT8, WeightEncoding
from triptych.core.weights.library_errors import library_errors
from triptych.modalities.diffusion.engine.loading.originals import (
    in_diffusers_names,
    text_in_transformers_names,
)
from triptych.modalities.diffusion.engine.loading.weights import Weights

Report = Callable[[float], None]
_CHOOSES_CODE = frozenset({"auto_map", "attn_implementation", "experts_implementation"})


class _WithoutMemory(TorchFunctionMode):
    """Gives parameters that layers create empty a shape but no memory. Buffers are computed."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The device of a part's weights, the type to compute in, and the `wanted` encoding."""

    device: torch.device
    dtype: torch.dtype
    wanted: str = AUTO
    native: NativeKernels | None = None

    def on(self, dtype: torch.dtype) -> BlockDevice:
        """The target of blocks, for computing in this type."""
        return BlockDevice(device=self.device, dtype=dtype, native=self.native)


def encoding_of(weights: Weights, holding: Holding) -> WeightEncoding:
    """The encoding to use for these weights. Raises `ConfigError` if they cannot have it.

    Devices with units for float8 hold it so, also when it is made of plain numbers. Elsewhere
    it is held as Q8_0, whose error is a few times smaller than its own.
    """
    wanted = holding.wanted
    backend, _, arch = Device(holding.device).target.partition(":")
    if wanted == FLOAT8 and multiplies_float8(backend, arch):
        wanted = FLOAT8_ROWS.name
    elif wanted == FLOAT8 and weights.dtype is torch.float8_e4m3fn:
        wanted = "q8_0"
    return WeightEncoding.of(wanted, weights.tensors)


def open_diffusers_module(
    kind: Any, weights: Weights, holding: Holding, report: Report, *, is_foreign: bool = False
) -> nn.Module:
    """A model of diffusers with these weights. Raises `WeightsError` naming the tensor.

    Weights that the class always computes in float32 stay in it. `is_foreign`: tensors may have
    the names of the original publication.
    """
    module = sketch(kind, weights.config)
    if is_foreign and any(t.name not in weights.tensors for t in _targets(module, weights)):
        weights = in_diffusers_names(module, weights)
    exact = frozenset(module._keep_in_fp32_modules or ())
    blocks = []
    for place in block_places(module, encoding_of(weights, holding)):
        dtype = _dtype_of(place.name, place.layer.weight, holding.dtype, exact)
        blocks.append(_BlockTarget(place, holding.on(dtype)))
        place.drop()
    allocate(module, holding.device, holding.dtype)
    load_tensors(weights, [*_targets(module, weights), *blocks], report=report)
    loaded: nn.Module = module
    return loaded


@dataclass(frozen=True, slots=True)
class _BlockTarget:
    """A layer whose weight is loaded as blocks; see `core.runtime.tensors.loading.Target`."""

    place: BlockPlace
    where: BlockDevice

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape

    def fill(self, source: TensorSource) -> None:
        self.place.put(self._held(source), self.where)

    def _held(self, source: Any) -> HeldWeight:
        """The weight in blocks, the checkpoint's own or made of plain values, or in float8."""
        name, form = self.place.name, self.place.format
        if form is FLOAT8_ROWS:
            return quantize_float8(source.read(name).to(self.where.device))
        stored: HeldWeight | None = source.read_packed(name)
        return quantize_blocks(source.read(name), form) if stored is None else stored

    def num_bytes(self, item_bytes: int) -> int:
        return self.place.num_bytes


def sketch(kind: Any, config: Mapping[str, Any]) -> Any:
    """A model whose weights have shapes but no memory.

    Fields that a diffusers class does not define stay readable in its `config`, since pipelines
    read some of them.
    """
    if not is_of_diffusers(kind):
        with torch.device("meta"):
            return kind(transformers_config(kind, config))
    fields = _plain(config)
    with (
        library_errors(f"config.json is not usable as {kind.__name__}"),
        errors_only("diffusers.configuration_utils"),
        _WithoutMemory(),
    ):
        return kind.from_config(fields).eval().requires_grad_(False)


def held_bytes(kind: Any, weights: Weights, holding: Holding, *, is_foreign: bool) -> int:
    """Bytes that a part takes, from its configuration and its tensors' headers alone.

    `is_foreign`: the file may also hold other parts.
    """
    encoding = encoding_of(weights, holding)
    item_bytes, infos = holding.dtype.itemsize, weights.tensors.values()
    has_blocks = any(encoding.format_of(i.name, i.shape[-1]) for i in infos if i.format)
    if has_blocks and is_of_diffusers(kind):  # all tensors stay, whatever their names
        plain = sum(math.prod(info.shape) for info in infos if not info.format)
        return plain * item_bytes + sum(info.num_bytes for info in infos if info.format)
    if not (has_blocks or is_foreign or encoding.is_made):
        return sum(math.prod(info.shape) for info in infos) * item_bytes
    module = sketch(kind, weights.config)
    num_bytes = 0
    for place in block_places(module, encoding):
        num_bytes += place.num_bytes
        place.drop()
    num_plain = sum(int(each.numel()) for each in module.state_dict().values())
    return num_bytes + num_plain * item_bytes


def is_of_diffusers(kind: Any) -> bool:
    """Whether a class is from diffusers, not from transformers."""
    return bool(kind.__module__.startswith("diffusers."))


def allocate(module: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Allocate memory for the weights of a sketch, and move everything else to the device."""
    exact = frozenset(module._keep_in_fp32_modules or ())
    state = {
        name: torch.empty(tensor.shape, dtype=_dtype_of(name, tensor, dtype, exact), device=device)
        for name, tensor in module.state_dict().items()
    }
    module.load_state_dict(state, assign=True)
    module.requires_grad_(False).to(device)


def open_transformers_module(
    kind: Any, weights: Weights, holding: Holding, report: Report, *, is_foreign: bool = False
) -> nn.Module:
    """A model of transformers, by its own loader: names changed between its releases.

    `is_foreign`: the file may be a whole checkpoint.
    """
    config = transformers_config(kind, weights.config)
    if is_foreign:
        weights = text_in_transformers_names(config, weights)
    state = {name: weights.read(name) for name in weights.tensors}
    with library_errors(f"The weights are not usable as {kind.__name__}"), transformers_loading():
        module, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=holding.dtype,
            ignore_mismatched_sizes=True,  # reported, and refused below
            output_loading_info=True,
        )
    check_complete(info, weights)
    loaded: nn.Module = module.eval().requires_grad_(False)
    places = block_places(loaded, encoding_of(weights, holding))

    def blocks_of(place: BlockPlace, weight: Tensor) -> HeldWeight:
        if place.format is FLOAT8_ROWS:
            return quantize_float8(weight.to(holding.device))
        stored = place.name in weights.tensors and weights.read_packed(place.name)
        return stored or quantize_blocks(weight, place.format)

    hold_blocks(loaded, places, blocks_of, holding.on(holding.dtype))
    report(1.0)
    return loaded


def transformers_config(kind: Any, config: Mapping[str, Any]) -> Any:
    """The configuration as an object of the class."""
    with library_errors(f"config.json is not usable as {kind.__name__}"):
        return kind.config_class.from_dict(_plain(config))


def _dtype_of(name: str, tensor: Tensor, dtype: torch.dtype, exact: frozenset[str]) -> torch.dtype:
    if not tensor.is_floating_point():
        return tensor.dtype
    return torch.float32 if exact & set(name.split(".")) else dtype


def _targets(module: Any, weights: Weights) -> list[TensorTarget]:
    """The target of each tensor; diffusers maps names from before it renamed its attention."""
    names = {name: name for name in weights.tensors}
    module._fix_state_dict_keys_on_load(names)
    return [
        TensorTarget(names.get(name, name), tensor) for name, tensor in module.state_dict().items()
    ]


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without private fields and fields that choose code to run."""
    if config.get("quantization_config"):
        raise WeightsError("config.json asks for a quantization_config, which is not supported.")
    return {
        name: _plain(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if not name.startswith("_") and name not in _CHOOSES_CODE
    }
