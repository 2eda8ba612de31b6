"""Attention in some layers, Mamba 2 in the others: Granite 4 hybrid, Bamba."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from triptych.core.errors import WeightsError
from triptych.core.runtime.decoders.families.mixtures import with_experts
from triptych.core.runtime.decoders.families.recurrent import layers_by_type
from triptych.core.runtime.decoders.families.relatives import granite
from triptych.core.runtime.decoders.hf_config import (
    CausalLmConfig,
    ConvolutionWidth,
    Count,
    Reader,
    StateHead,
    attention_of,
    check_silu,
    decoder_of,
    parse,
)
from triptych.core.runtime.kernels.routing import Routing
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.mamba2 import Mamba2Config
from triptych.core.runtime.layers.mixers import MixerConfig
from triptych.core.runtime.layers.moe import MoeConfig

_Some = Annotated[int, msgspec.Meta(ge=0)]
_INFINITY = {"__float__": "Infinity"}
"""As transformers writes it."""


class Mamba2Fields(CausalLmConfig, frozen=True, kw_only=True):
    """The fields of Mamba 2's layers, as most families name them."""

    mamba_n_heads: Count = 128
    mamba_n_groups: Count = 1
    mamba_d_state: StateHead = 256
    mamba_d_head: Count | Literal["auto"] = "auto"
    mamba_d_conv: ConvolutionWidth = 4
    mamba_expand: Count = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, float] | None = None


def parse_with_limits(config: Mapping[str, Any], kind: type[Any]) -> Any:
    """Check `config`, in which the limit of steps may be infinite."""
    limits = config.get("time_step_limit") or (0.0, _INFINITY)
    if isinstance(limits, list | tuple):
        limits = [float("inf") if limit == _INFINITY else limit for limit in limits]
    return parse({**config, "time_step_limit": limits}, kind)


def mamba_of(fields: Mamba2Fields, inner: int = 0) -> Mamba2Config:
    """The layer of these fields, with `inner` values; 0: as many as `mamba_expand` says."""
    check_silu(fields)
    inner = inner or fields.mamba_expand * fields.hidden_size
    num_heads, size = fields.mamba_n_heads, fields.mamba_d_head
    head_dim = inner // num_heads if isinstance(size, str) else size
    if head_dim * num_heads != inner or num_heads % fields.mamba_n_groups:
        raise WeightsError("config.json: mamba_n_heads does not fit the sizes of Mamba's layers.")
    return Mamba2Config(
        hidden_size=fields.hidden_size,
        num_heads=num_heads,
        num_groups=fields.mamba_n_groups,
        head_dim=head_dim,
        state_dim=fields.mamba_d_state,
        width=fields.mamba_d_conv,
        norm_eps=fields.rms_norm_eps,
        step_limits=fields.time_step_limit or (0.0, float("inf")),
        has_bias=fields.mamba_proj_bias,
        has_convolution_bias=fields.mamba_conv_bias,
    )


class _GraniteHybridFields(Mamba2Fields, frozen=True, kw_only=True):
    attention_multiplier: float = 1.0
    num_local_experts: _Some = 8
    num_experts_per_tok: _Some = 2
    shared_intermediate_size: Count = 1024
    position_embedding_type: str | None = None


def _granite_hybrid(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Granite with Mamba 2 in most layers, and with experts or a plain MLP."""
    fields: _GraniteHybridFields = parse_with_limits(config, _GraniteHybridFields)
    attention = replace(
        attention_of(fields),
        scale=fields.attention_multiplier,
        uses_rope=fields.position_embedding_type == "rope",
    )
    kinds: dict[str, MixerConfig] = {
        "full_attention": attention,
        "attention": attention,  # as older files name them
        "linear_attention": mamba_of(fields),
        "mamba": mamba_of(fields),
    }
    types = fields.layer_types or tuple(config.get("layers_block_type") or ())
    layers = layers_by_type(fields, types, kinds)
    decoder = replace(granite(config, max_length), attention=layers, naming="granite_hybrid")
    if not fields.num_local_experts:
        return replace(decoder, intermediate_size=fields.shared_intermediate_size)
    moe = MoeConfig(
        num_experts=fields.num_local_experts,
        routing=Routing(num_chosen=fields.num_experts_per_tok),
        intermediate_size=fields.intermediate_size,
        shared_size=fields.shared_intermediate_size,
        naming="granite",
    )
    return with_experts(decoder, moe)


class _BambaFields(Mamba2Fields, frozen=True, kw_only=True):
    rms_norm_eps: Annotated[float, msgspec.Meta(gt=0)] = 1e-5
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 262144
    partial_rotary_factor: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = 0.5
    attn_layer_indices: tuple[int, ...] | None = None


def _bamba(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Llama with Mamba 2 in most layers."""
    fields: _BambaFields = parse_with_limits(config, _BambaFields)
    kinds: dict[str, MixerConfig] = {
        "full_attention": attention_of(fields),
        "linear_attention": mamba_of(fields),
    }
    types = tuple(
        "full_attention" if layer in (fields.attn_layer_indices or ()) else "linear_attention"
        for layer in range(fields.num_hidden_layers)
    )
    decoder = decoder_of(fields, layers_by_type(fields, types, kinds), max_length)
    return replace(decoder, naming="bamba")


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "BambaForCausalLM": _bamba,
        "GraniteMoeHybridForCausalLM": _granite_hybrid,
    }
)
