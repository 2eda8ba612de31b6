"""Llama 4 (text): chunks of positions, layers without them, and one expert with a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from triptych.core.runtime.decoders.families.mixtures import with_experts
from triptych.core.runtime.decoders.hf_config import (
    CausalLmConfig,
    Count,
    NotNativeError,
    Positive,
    Reader,
    attention_of,
    decoder_of,
    parse,
)
from triptych.core.runtime.kernels.routing import Routing
from triptych.core.runtime.layers.attention import AttentionConfig, HeadNormConfig
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.moe import MoeConfig
from triptych.core.runtime.layers.rotary import QueryScaling


class _Llama4Config(CausalLmConfig, frozen=True, kw_only=True):
    max_position_embeddings: Count = 131072
    rms_norm_eps: Positive = 1e-5
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    rope_theta: Positive = 500_000.0
    intermediate_size_mlp: Count = 16384
    num_local_experts: Count = 16
    num_experts_per_tok: Count = 1
    moe_layers: tuple[int, ...] | None = None
    interleave_moe_layer_step: Count = 1
    use_qk_norm: bool = True
    attention_chunk_size: Count | None = 8192
    attn_temperature_tuning: bool = True
    floor_scale: Count = 8192
    attn_scale: Positive = 0.1


def _llama4(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Weights of experts multiply their inputs; queries without rotation grow with positions."""
    fields = parse(config, _Llama4Config)
    layers, step = range(fields.num_hidden_layers), fields.interleave_moe_layer_step
    sparse = layers[step - 1 :: step] if fields.moe_layers is None else fields.moe_layers
    moe = MoeConfig(
        num_experts=fields.num_local_experts,
        routing=Routing(
            num_chosen=fields.num_experts_per_tok, scoring="sigmoid", renormalizes=False
        ),
        intermediate_size=fields.intermediate_size,
        shared_size=fields.intermediate_size,
        scales_inputs=True,
        dense_layers=frozenset(layers) - frozenset(sparse),
        naming="llama4",
    )
    decoder = with_experts(decoder_of(fields, _attention(fields), max_length), moe)
    scaling = QueryScaling(beta=fields.attn_scale, length=fields.floor_scale, offset=1)
    return replace(decoder, intermediate_size=fields.intermediate_size_mlp, query_scaling=scaling)


def _attention(fields: _Llama4Config) -> tuple[AttentionConfig, ...]:
    layers, every = range(fields.num_hidden_layers), fields.no_rope_layer_interval
    uses_rope = fields.no_rope_layers or tuple(int((n + 1) % every != 0) for n in layers)
    chunk = fields.attention_chunk_size
    default = tuple(
        "chunked_attention" if rope and chunk else "full_attention" for rope in uses_rope
    )
    kinds = fields.layer_types or default
    if not set(kinds) <= {"chunked_attention", "full_attention"}:
        raise NotNativeError(f"config.json: layer_types {sorted(set(kinds))} are not supported.")
    norm = HeadNormConfig(eps=fields.rms_norm_eps, has_weights=False, is_after_rotation=True)
    base = replace(attention_of(fields), has_interleaved_rope=True)
    return tuple(
        replace(
            base,
            window=chunk if kinds[layer] == "chunked_attention" else None,
            is_chunked=kinds[layer] == "chunked_attention",
            uses_rope=bool(uses_rope[layer]),
            head_norm=norm if fields.use_qk_norm and uses_rope[layer] else None,
            scales_queries=fields.attn_temperature_tuning and not uses_rope[layer],
        )
        for layer in layers
    )


READERS: Mapping[str, Reader] = MappingProxyType({"Llama4ForCausalLM": _llama4})
