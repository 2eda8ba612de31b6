"""Llama and its relatives: Mistral, SmolLM3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from triptych.core.runtime.decoders.hf_config import (
    CausalLmConfig,
    Count,
    Positive,
    Reader,
    attention_of,
    decoder_of,
    layer_windows,
    parse,
)
from triptych.core.runtime.layers.attention import AttentionConfig
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.rotary import QueryScaling


class _SmolLm3Config(CausalLmConfig, frozen=True, kw_only=True):
    rope_theta: float = 2_000_000.0
    tie_word_embeddings: bool = True
    num_key_value_heads: Count | None = 4
    max_position_embeddings: Count = 32768


class MistralConfig(CausalLmConfig, frozen=True, kw_only=True):
    """The fields of Mistral, with its defaults."""

    sliding_window: Count | None = 4096
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 131072


def _llama(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    fields = parse(config, CausalLmConfig)
    return decoder_of(fields, (attention_of(fields),) * fields.num_hidden_layers, max_length)


def _smollm3(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Llama, except that every fourth layer has no positions (and may have a window)."""
    fields = parse(config, _SmolLm3Config)
    num_layers, every = fields.num_hidden_layers, fields.no_rope_layer_interval
    default = tuple(int((layer + 1) % every != 0) for layer in range(num_layers))
    uses_rope = fields.no_rope_layers or default
    windows: tuple[int | None, ...] = (None,) * num_layers
    if fields.use_sliding_window:
        windows = layer_windows(fields, tuple(not rope for rope in uses_rope))
    base = attention_of(fields)
    layers = zip(uses_rope, windows, strict=False)
    attention = tuple(replace(base, uses_rope=bool(r), window=w) for r, w in layers)
    return decoder_of(fields, attention, max_length)


def _mistral(
    config: Mapping[str, Any], max_length: int, kind: type[MistralConfig] = MistralConfig
) -> DecoderConfig:
    """Llama without biases; one window for all layers unless `layer_types` says otherwise."""
    fields = parse(config, kind)
    base = replace(attention_of(fields), has_qkv_bias=False, has_out_bias=False)
    windows = layer_windows(fields, (True,) * fields.num_hidden_layers)
    attention = tuple(replace(base, window=window) for window in windows)
    return decoder_of(fields, attention, max_length)


class _Ministral3Config(MistralConfig, frozen=True, kw_only=True):
    head_dim: Count | None = 128
    sliding_window: Count | None = None
    max_position_embeddings: Count = 262_144
    rms_norm_eps: Positive = 1e-5


_MINISTRAL3_ROPE = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
)
"""The default of the family."""


def _ministral3(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Mistral with YaRN, and queries that grow with their positions."""
    config = {"rope_parameters": _MINISTRAL3_ROPE, **config}
    decoder = _mistral(config, max_length, _Ministral3Config)
    rope = parse(config, _Ministral3Config).rope_parameters
    if rope is None or rope.llama_4_scaling_beta is None:
        return decoder
    scaling = QueryScaling(beta=rope.llama_4_scaling_beta, length=decoder.rope.trained_length)
    attention = tuple(
        replace(layer, scales_queries=True)
        for layer in decoder.attention
        if isinstance(layer, AttentionConfig)
    )
    return replace(decoder, attention=attention, query_scaling=scaling)


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "LlamaForCausalLM": _llama,
        "SmolLM3ForCausalLM": _smollm3,
        "MistralForCausalLM": _mistral,
        "MinistralForCausalLM": _mistral,
        "Ministral3ForCausalLM": _ministral3,
    }
)
