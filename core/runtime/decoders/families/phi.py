"""Phi 3 and 4, GLM 4, and others whose files have fused projections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from triptych.core.runtime.decoders.families.qwen import with_axes
from triptych.core.runtime.decoders.hf_config import (
    CausalLmConfig,
    Count,
    Positive,
    Reader,
    Share,
    attention_of,
    decoder_of,
    parse,
)
from triptych.core.runtime.layers.decoder_layer import DecoderConfig


class _PhiConfig(CausalLmConfig, frozen=True, kw_only=True):
    max_position_embeddings: Count = 4096
    original_max_position_embeddings: Count | None = 4096
    rms_norm_eps: Positive = 1e-5


class _GlmConfig(CausalLmConfig, frozen=True, kw_only=True):
    num_key_value_heads: Count | None = 2
    head_dim: Count | None = 128
    max_position_embeddings: Count = 131_072
    rms_norm_eps: Positive = 1.5625e-7
    partial_rotary_factor: Share | None = 0.5
    attention_bias: bool = True


def _phi3(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Llama with fused projections, one window for all layers, and LongRoPE under three names."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, Mapping):
        old = {"su": "longrope", "yarn": "longrope"}
        kind = rope.get("rope_type", rope.get("type"))
        config = {**config, "rope_parameters": {**rope, "rope_type": old.get(kind, kind)}}
    fields = parse(config, _PhiConfig)
    own = replace(
        attention_of(fields),
        has_qkv_bias=False,
        has_out_bias=False,
        window=fields.sliding_window,
    )
    decoder = decoder_of(fields, (own,) * fields.num_hidden_layers, max_length)
    return replace(decoder, naming="phi")


def _glm(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Llama with half of each head rotated, in adjacent pairs."""
    fields = parse(config, _GlmConfig)
    own = replace(attention_of(fields), has_out_bias=False, has_interleaved_rope=True)
    decoder = decoder_of(fields, (own,) * fields.num_hidden_layers, max_length)
    return replace(decoder, naming="glm")


def _glm4(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """GLM with norms also after attention and MLP."""
    return replace(_glm(config, max_length), has_post_norms=True, naming="glm4")


def _glm_ocr(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """GLM 4 with positions of three axes, no biases, and whole heads rotated by default."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    own = {"head_dim": head_dim, "partial_rotary_factor": 1.0, "attention_bias": False}
    fields = parse({**own, **config}, _GlmConfig)
    decoder = with_axes(_glm4({**own, **config}, max_length), fields, (8, 12, 12))
    return replace(decoder, num_draft_layers=int(config.get("num_nextn_predict_layers") or 0))


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "Phi3ForCausalLM": _phi3,
        "GlmForCausalLM": _glm,
        "Glm4ForCausalLM": _glm4,
        "GlmOcrTextModel": _glm_ocr,
    }
)
