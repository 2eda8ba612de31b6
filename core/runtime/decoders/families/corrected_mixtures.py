"""Mixtures of experts whose choice is corrected by a bias, most by sigmoid scores.

GLM-4.5, dots.llm1, Solar Open, K-EXAONE, MiniMax-M2 and ERNIE 4.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from triptych.core.runtime.decoders.families.mixtures import Some, with_experts
from triptych.core.runtime.decoders.hf_config import (
    CausalLmConfig,
    Count,
    NotNativeError,
    Positive,
    Reader,
    attention_of,
    decoder_of,
    layer_windows,
    parse,
)
from triptych.core.runtime.kernels.routing import Routing
from triptych.core.runtime.layers.attention import AttentionConfig, HeadNormConfig
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.moe import MoeConfig


class _GroupedConfig(CausalLmConfig, frozen=True, kw_only=True):
    """The fields of DeepSeek-V3's mixtures, with the defaults of GLM-4.5."""

    max_position_embeddings: Count = 131072
    rms_norm_eps: Positive = 1e-5
    num_key_value_heads: Count | None = 8
    moe_intermediate_size: Count = 1408
    num_experts_per_tok: Count = 8
    n_routed_experts: Count = 128
    n_shared_experts: Some | None = 1
    routed_scaling_factor: Positive = 1.0
    n_group: Count | None = 1
    topk_group: Count | None = 1
    first_k_dense_replace: Some = 1
    norm_topk_prob: bool = True
    num_nextn_predict_layers: Some | None = 0


class _Glm4MoeConfig(_GroupedConfig, frozen=True, kw_only=True):
    partial_rotary_factor: float | None = 0.5
    use_qk_norm: bool = False
    num_nextn_predict_layers: Some | None = 1


class _Dots1Config(_GroupedConfig, frozen=True, kw_only=True):
    max_position_embeddings: Count = 2048
    rms_norm_eps: Positive = 1e-6
    num_key_value_heads: Count | None = 32
    first_k_dense_replace: Some = 0
    norm_topk_prob: bool = False
    sliding_window: Count | None = 4096
    max_window_layers: Some = 62


class _SolarOpenConfig(_GroupedConfig, frozen=True, kw_only=True):
    intermediate_size: Count = 10240  # no layer has it
    head_dim: Count | None = 128
    rope_theta: Positive = 1_000_000.0
    moe_intermediate_size: Count = 1280


class _ExaoneMoeConfig(_GroupedConfig, frozen=True, kw_only=True):
    max_position_embeddings: Count = 2048
    num_key_value_heads: Count | None = 32
    moe_intermediate_size: Count = 1024
    num_experts: Count = 64
    num_shared_experts: Some = 1
    routed_scaling_factor: Positive = 2.5
    sliding_window: Count | None = 4096
    sliding_window_pattern: Count | None = 4
    mlp_layer_types: tuple[str, ...] | None = None


class _MiniMaxM2Config(CausalLmConfig, frozen=True, kw_only=True):
    max_position_embeddings: Count = 196608
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    rope_theta: Positive = 5_000_000.0
    num_local_experts: Count = 256
    num_experts_per_tok: Count = 8
    rotary_dim: Count | None = None


class _Ernie45MoeConfig(CausalLmConfig, frozen=True, kw_only=True):
    max_position_embeddings: Count = 131072
    rms_norm_eps: Positive = 1e-5
    num_key_value_heads: Count | None = 4
    rope_theta: Positive = 500_000.0
    tie_word_embeddings: bool = True
    use_bias: bool = False
    moe_intermediate_size: Count = 1536
    moe_k: Count = 6
    moe_num_experts: Count = 64
    moe_num_shared_experts: Some = 2
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1
    moe_layer_interval: Count = 1


def _mixture(fields: _GroupedConfig) -> MoeConfig:
    """Experts in groups, of which the best are chosen by corrected sigmoid scores."""
    routing = Routing(
        num_chosen=fields.num_experts_per_tok,
        scoring="sigmoid",
        renormalizes=fields.norm_topk_prob,
        scale=fields.routed_scaling_factor,
        num_groups=fields.n_group or 1,
        num_chosen_groups=fields.topk_group or 1,
    )
    return MoeConfig(
        num_experts=fields.n_routed_experts,
        routing=routing,
        intermediate_size=fields.moe_intermediate_size,
        shared_size=fields.moe_intermediate_size * (fields.n_shared_experts or 0),
        has_correction=True,
        dense_layers=frozenset(range(min(fields.first_k_dense_replace, fields.num_hidden_layers))),
    )


def _decoder(
    fields: _GroupedConfig, attention: tuple[AttentionConfig, ...], max_length: int, moe: MoeConfig
) -> DecoderConfig:
    decoder = with_experts(decoder_of(fields, attention, max_length), moe)
    return replace(decoder, num_draft_layers=fields.num_nextn_predict_layers or 0)


def _glm4_moe(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Half of each head is rotated; GLM-4.5 normalizes heads, GLM-4.5-Air does not."""
    fields = parse(config, _Glm4MoeConfig)
    base = replace(attention_of(fields), has_out_bias=False)
    if fields.use_qk_norm:
        base = replace(base, head_norm=HeadNormConfig(eps=fields.rms_norm_eps))
    attention = (base,) * fields.num_hidden_layers
    return _decoder(fields, attention, max_length, _mixture(fields))


def _solar_open(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """GLM-4.5's mixture in every layer of a Llama."""
    fields = parse(config, _SolarOpenConfig)
    base = replace(attention_of(fields), has_out_bias=False)
    attention = (base,) * fields.num_hidden_layers
    moe = replace(_mixture(fields), dense_layers=frozenset())
    return _decoder(fields, attention, max_length, moe)


def _dots1(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Qwen3's attention, with a window in the last layers."""
    fields = parse(config, _Dots1Config)
    layers = range(fields.num_hidden_layers)
    windows = layer_windows(fields, tuple(layer >= fields.max_window_layers for layer in layers))
    base = replace(attention_of(fields), head_norm=HeadNormConfig(eps=fields.rms_norm_eps))
    attention = tuple(replace(base, window=window) for window in windows)
    return _decoder(fields, attention, max_length, _mixture(fields))


def _exaone_moe(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Windows in most layers; the others have no positions."""
    fields = parse(config, _ExaoneMoeConfig)
    layers, every = range(fields.num_hidden_layers), fields.sliding_window_pattern
    has_windows = fields.sliding_window is not None and every is not None
    sliding = tuple(has_windows and (layer + 1) % (every or 1) != 0 for layer in layers)
    windows = layer_windows(fields, sliding)
    base = replace(
        attention_of(fields),
        has_qkv_bias=False,
        has_out_bias=False,
        head_norm=HeadNormConfig(eps=fields.rms_norm_eps),
    )
    attention = tuple(
        replace(base, window=window, uses_rope=window is not None or fields.sliding_window is None)
        for window in windows
    )
    moe = replace(
        _mixture(fields),
        num_experts=fields.num_experts,
        shared_size=fields.moe_intermediate_size * fields.num_shared_experts,
        naming="exaone",
    )
    if (kinds := fields.mlp_layer_types) is not None:
        dense = frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")
        moe = replace(moe, dense_layers=dense)
    return _decoder(fields, attention, max_length, moe)


def _minimax_m2(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Norms of all heads together, half of each head rotated; experts in every layer."""
    fields = parse(config, _MiniMaxM2Config)
    if fields.rotary_dim is not None:
        share = fields.rotary_dim / (fields.head_dim or fields.rotary_dim)
        fields = parse({"partial_rotary_factor": share, **config}, _MiniMaxM2Config)
    moe = MoeConfig(
        num_experts=fields.num_local_experts,
        routing=Routing(num_chosen=fields.num_experts_per_tok, scoring="sigmoid"),
        intermediate_size=fields.intermediate_size,
        has_correction=True,
        naming="minimax",
    )
    head_norm = HeadNormConfig(eps=fields.rms_norm_eps, is_joint=True)
    base = replace(
        attention_of(fields), has_qkv_bias=False, has_out_bias=False, head_norm=head_norm
    )
    attention = (base,) * fields.num_hidden_layers
    return with_experts(decoder_of(fields, attention, max_length), moe)


def _ernie4_5_moe(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Heads rotated by neighbouring pairs, softmax scores, experts in some of the layers."""
    fields = parse(config, _Ernie45MoeConfig)
    if fields.use_bias:
        raise NotNativeError("config.json: use_bias is not supported.")
    layers = range(fields.num_hidden_layers)
    end = fields.moe_layer_end_index
    last = len(layers) - 1 if end == -1 else end
    sparse = {
        layer
        for layer in layers[fields.moe_layer_start_index : last + 1]
        if (layer + 1) % fields.moe_layer_interval == 0
    }
    moe = MoeConfig(
        num_experts=fields.moe_num_experts,
        routing=Routing(num_chosen=fields.moe_k),
        intermediate_size=fields.moe_intermediate_size,
        shared_size=fields.moe_intermediate_size * fields.moe_num_shared_experts,
        has_correction=True,
        dense_layers=frozenset(layers) - sparse,
        naming="ernie",
    )
    base = replace(attention_of(fields), has_interleaved_rope=True)
    attention = (base,) * fields.num_hidden_layers
    return with_experts(decoder_of(fields, attention, max_length), moe)


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "Glm4MoeForCausalLM": _glm4_moe,
        "Dots1ForCausalLM": _dots1,
        "SolarOpenForCausalLM": _solar_open,
        "ExaoneMoeForCausalLM": _exaone_moe,
        "MiniMaxM2ForCausalLM": _minimax_m2,
        "Ernie4_5_MoeForCausalLM": _ernie4_5_moe,
    }
)
