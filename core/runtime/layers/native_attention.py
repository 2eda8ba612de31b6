"""The mixer of one layer in the native step: addresses of its weights, its shape and its rules.

Owns the part of the structure `Layer` that attention or a recurrent part fills, by kind, and the
tensors that are made for it. The order of the step is in core/runtime/kernels/native/decoder.c,
latents.c and recurrent.c.

Shapes: X heads, D head dim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from triptych.core.runtime.kernels.native.arguments import (
    KeyIndexPointers,
    LatentPointers,
    LayerFlags,
    LayerPointers,
    NormPointers,
    ProjectionPointers,
    point_to_pages,
    pointer,
)
from triptych.core.runtime.kernels.native.state_arguments import RecurrentArguments
from triptych.core.runtime.layers.attention import Attention, KvCache
from triptych.core.runtime.layers.delta_net import GatedDeltaNet
from triptych.core.runtime.layers.key_index import KeyIndex
from triptych.core.runtime.layers.latent_attention import LatentAttention
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.mixers import Mixer, MixerPart, mixer_parts
from triptych.core.runtime.layers.native_mixture import projection
from triptych.core.runtime.layers.norm import Norm
from triptych.core.runtime.layers.recurrent import RecurrentLayer


class NativeMixer(Protocol):
    """One layer's attention in the step, a recurrent part, or both.

    `widths` are the values that it keeps for a token: until it attends, and from then on.
    """

    widths: tuple[int, int]

    def fields(self) -> dict[str, Any]:
        """Its fields of `LayerPointers`, by name."""

    def bind(self, pointers: LayerPointers, kv: KvCache) -> None:
        """Point the structure to the layer's part of a cache."""


def native_mixer(mixer: Mixer | None, norm_dtype: torch.dtype) -> NativeMixer:
    """The mixer of a prepared layer; its pointers live no longer than it."""
    return _Together([_native_part(part, norm_dtype) for part in mixer_parts(mixer)])


def _native_part(part: MixerPart, norm_dtype: torch.dtype) -> NativeMixer:
    if isinstance(part, RecurrentLayer):
        return _Recurrent(part)
    if isinstance(part, LatentAttention):
        return _Latents(part)
    return _Heads(part, norm_dtype)


class _Together:
    """All parts of a mixer, which use the same memory one after the other."""

    def __init__(self, parts: Sequence[NativeMixer]) -> None:
        self._parts = parts
        before, after = zip((0, 0), *(part.widths for part in parts), strict=True)
        self.widths = max(before), max(after)

    def fields(self) -> dict[str, Any]:
        return {name: value for part in self._parts for name, value in part.fields().items()}

    def bind(self, pointers: LayerPointers, kv: KvCache) -> None:
        for part in self._parts:
            part.bind(pointers, kv)


class _Heads:
    """Queries, keys and values of heads."""

    def __init__(self, attention: Attention, norm_dtype: torch.dtype) -> None:
        self._owner = attention
        config, rules = attention.config, attention.rules
        assert rules is not None
        self.widths = config.num_outputs, config.num_heads * config.head_dim
        self._norm = rules.norm
        self._weight_XD = None if rules.norm is None else rules.norm.weight_XD.to(norm_dtype)
        self._ones_D: torch.Tensor | None = None
        if config.value_norm_eps is not None:
            self._ones_D = torch.ones(config.head_dim, dtype=norm_dtype)
        sinks_H = attention.sinks_H
        self._sinks_H = None if sinks_H is None else sinks_H.float()

    def fields(self) -> dict[str, Any]:
        config, rule = self._owner.config, self._owner.rule
        return {
            "qkv": projection_pointers(self._owner.qkv),
            "out": projection_pointers(self._owner.out),
            "head_norms": pointer(self._weight_XD),
            "value_norm": pointer(self._ones_D),
            "sinks": pointer(self._sinks_H),
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "window": rule.span or 0,
            "rotation": -1 if not config.uses_rope else int(config.uses_local_rope),
            "flags": self._flags(),
            "scale": rule.scale,
            "attention_scale": config.out_scale,
            "soft_cap": rule.soft_cap or 0.0,
            "head_eps": 0.0 if self._norm is None else self._norm.eps,
            "value_eps": config.value_norm_eps or 0.0,
        }

    def _flags(self) -> LayerFlags:
        config, norm = self._owner.config, self._norm
        has = {
            LayerFlags.READS_CELLS: config.reads_layer is not None,
            LayerFlags.ADJACENT_PAIRS: config.has_interleaved_rope,
            LayerFlags.JOINT_NORM: norm is not None and norm.is_joint,
            LayerFlags.NORM_AFTER_ROTATION: norm is not None and norm.is_after_rotation,
            LayerFlags.LAYER_NORM_OF_HEADS: norm is not None and norm.kind == "layer",
            LayerFlags.SCALED_QUERIES: config.scales_queries,
            LayerFlags.GATED_OUTPUT: config.has_output_gate,
        }
        return LayerFlags(sum(flag for flag, is_set in has.items() if is_set))

    def bind(self, pointers: LayerPointers, kv: KvCache) -> None:
        cells = self._owner.cells
        point_to_pages(pointers, kv.pages[cells])
        in_window = LayerFlags.WINDOW_PAGES if kv.windowed[cells] else LayerFlags(0)
        pointers.flags = self._flags() | in_window


class _Latents:
    """Rows for all heads."""

    def __init__(self, attention: LatentAttention) -> None:
        self._owner = attention
        config, num_heads = attention.config, attention.config.num_heads
        queries = 0 if config.q_rank is None else num_heads * config.key_dim
        rows = num_heads * config.row_dim
        index = attention.index
        of_index = 0 if index is None else index.key.num_outputs + index.queries.num_outputs
        self.widths = (
            config.query_inputs + config.row_dim + queries + rows,
            max(num_heads * (config.kv_rank + config.value_dim), of_index),
        )
        self._index = None if index is None else _index_pointers(index)
        self._pointers = self._point()

    def _point(self) -> LatentPointers:
        own, config = self._owner, self._owner.config
        absorb, expand = own.heads_of_keys, own.heads_of_values
        assert absorb is not None
        assert expand is not None
        return LatentPointers(
            down=projection_pointers(own.down),
            q_up=projection_pointers(own.q_up),
            absorb=absorb.projection(),
            expand=expand.projection(),
            q_norm=norm_pointers(own.q_norm),
            kv_norm=norm_pointers(own.kv_norm),
            index=None if self._index is None else ctypes.pointer(self._index),
            query_inputs=config.query_inputs,
            kv_rank=config.kv_rank,
            nope_dim=config.nope_dim,
            rope_dim=config.rope_dim,
            value_dim=config.value_dim,
            eps=config.norm_eps,
        )

    def fields(self) -> dict[str, Any]:
        config = self._owner.config
        has = {
            LayerFlags.ADJACENT_PAIRS: config.is_interleaved,
            LayerFlags.SCALED_QUERIES: config.scales_queries,
        }
        return {
            "out": projection_pointers(self._owner.out),
            "latents": ctypes.pointer(self._pointers),
            "num_heads": config.num_heads,
            "num_kv_heads": 1,
            "head_dim": config.row_dim,
            "flags": LayerFlags(sum(flag for flag, is_set in has.items() if is_set)),
            "scale": config.scale,
            "attention_scale": 1.0,
        }

    def bind(self, pointers: LayerPointers, kv: KvCache) -> None:
        point_to_pages(pointers, kv.pages[self._owner.cells])
        if self._index is not None:
            assert self._owner.index is not None
            pages = kv.pages[self._owner.index.cells]
            self._index.k_pages = pointer(pages.k_NPKD)
            self._index.k_scales = pointer(pages.k_scale_NPK)


class _Recurrent:
    """Projections, and what lies between them."""

    def __init__(self, layer: RecurrentLayer) -> None:
        self._owner = layer
        self.widths = layer.config.num_inputs, layer.config.num_outputs
        self._bound: RecurrentArguments | None = None

    def fields(self) -> dict[str, Any]:
        return {
            "recurrent_in": projection_pointers(self._owner.into),
            "recurrent_out": projection_pointers(self._owner.out),
            **self._later(),
        }

    def _later(self) -> dict[str, Any]:
        """The projections of low values, if there are any."""
        if not isinstance(self._owner, GatedDeltaNet):
            return {}
        later = {"decays": self._owner.decays, "gates": self._owner.gates}
        return {name: projection_pointers(linear) for name, linear in later.items()}

    def bind(self, pointers: LayerPointers, kv: KvCache) -> None:
        assert kv.states is not None, "a model with recurrent layers has states"
        self._bound = self._owner.arguments(kv.states.layers[self._owner.cells])
        pointers.recurrent = ctypes.pointer(self._bound)


def _index_pointers(index: KeyIndex) -> KeyIndexPointers:
    config = index.config
    return KeyIndexPointers(
        key=projection_pointers(index.key),
        queries=projection_pointers(index.queries),
        weights=projection_pointers(index.weights),
        key_norm=norm_pointers(index.norm),
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        has_adjacent_pairs=config.is_interleaved,
        scale=config.rule.scale,
        eps=config.norm_eps,
    )


def projection_pointers(linear: Linear | None) -> ProjectionPointers:
    """The structure of a projection that may be absent."""
    return ProjectionPointers() if linear is None else projection(linear)


def norm_pointers(norm: Norm | None) -> NormPointers:
    """The structure of a norm that may be absent."""
    if norm is None:
        return NormPointers()
    return NormPointers(pointer(norm.weight_C), pointer(norm.bias_C))
