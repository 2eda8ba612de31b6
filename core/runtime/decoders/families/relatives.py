"""Relatives of Llama that differ in one or two parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec

from triptych.core.runtime.decoders.hf_config import (
    CausalLmConfig,
    Count,
    Positive,
    Reader,
    Share,
    attention_of,
    decoder_of,
    head_dim,
    parse,
)
from triptych.core.runtime.layers.attention import AttentionConfig, HeadNormConfig
from triptych.core.runtime.layers.decoder_layer import DecoderConfig


def _alike(fields: CausalLmConfig, own: AttentionConfig, max_length: int) -> DecoderConfig:
    return decoder_of(fields, (own,) * fields.num_hidden_layers, max_length)


class _SeedOssConfig(CausalLmConfig, frozen=True, kw_only=True):
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    max_position_embeddings: Count = 524_288
    attention_bias: bool = True
    attention_out_bias: bool = False


def _seed_oss(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Biases on query, key and value, and on the output by a field of its own."""
    fields = parse(config, _SeedOssConfig)
    own = replace(attention_of(fields), has_out_bias=fields.attention_out_bias)
    return _alike(fields, own, max_length)


class _GraniteConfig(CausalLmConfig, frozen=True, kw_only=True):
    embedding_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0
    residual_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0


def granite(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Multipliers of embeddings, scores, residual additions and logits."""
    fields = parse(config, _GraniteConfig)
    own = replace(attention_of(fields), scale=fields.attention_multiplier)
    return replace(
        _alike(fields, own, max_length),
        embedding_scale=fields.embedding_multiplier,
        residual_scale=fields.residual_multiplier,
        logit_scale=1 / fields.logits_scaling,
    )


class _HunyuanConfig(CausalLmConfig, frozen=True, kw_only=True):
    rms_norm_eps: Positive = 1e-5


def hunyuan(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Norms on heads after their rotation; frequencies stretched by a fixed `alpha`."""
    fields = parse(config, _HunyuanConfig)
    rope = fields.rope_parameters or fields.rope_scaling
    if rope is not None and (rope.rope_type or rope.type) == "dynamic" and rope.alpha:
        dim = head_dim(fields)
        theta = (rope.rope_theta or fields.rope_theta) * rope.alpha ** (dim / (dim - 2))
        plain = msgspec.structs.replace(rope, rope_type="default", rope_theta=theta)
        fields = msgspec.structs.replace(fields, rope_parameters=plain)
    norm = HeadNormConfig(eps=fields.rms_norm_eps, is_after_rotation=True)
    decoder = _alike(fields, replace(attention_of(fields), head_norm=norm), max_length)
    return replace(decoder, naming="hunyuan")


class _ArceeConfig(CausalLmConfig, frozen=True, kw_only=True):
    hidden_act: str = "relu2"
    max_position_embeddings: Count = 4096
    rms_norm_eps: Positive = 1e-5


def _arcee(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """An MLP without a gate."""
    fields = parse(config, _ArceeConfig)
    return replace(_alike(fields, attention_of(fields), max_length), has_gate=False)


_APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Where a configuration has no other."""


class _ApertusConfig(CausalLmConfig, frozen=True, kw_only=True):
    max_position_embeddings: Count = 65536
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 12_000_000.0


def _apertus(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Norms on heads, and an MLP without a gate, whose activation has weights."""
    is_xielu = config.get("hidden_act", "xielu") == "xielu"
    plain = {**config, "hidden_act": "silu"} if is_xielu else dict(config)
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        plain["rope_parameters"] = _APERTUS_ROPE
    fields = parse(plain, _ApertusConfig)
    own = replace(attention_of(fields), head_norm=HeadNormConfig(eps=fields.rms_norm_eps))
    decoder = _alike(fields, own, max_length)
    return replace(decoder, has_gate=False, has_xielu=is_xielu, naming="apertus")


class _HeliumConfig(CausalLmConfig, frozen=True, kw_only=True):
    head_dim: Count | None = 128
    num_key_value_heads: Count | None = 20
    max_position_embeddings: Count = 4096
    rms_norm_eps: Positive = 1e-8
    rope_theta: Positive = 100_000.0


def _helium(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Adjacent pairs are rotated."""
    fields = parse(config, _HeliumConfig)
    own = replace(attention_of(fields), has_out_bias=False, has_interleaved_rope=True)
    return _alike(fields, own, max_length)


class _LayerNormConfig(CausalLmConfig, frozen=True, kw_only=True):
    """Fields of models with layer norms, under the names of several families."""

    max_position_embeddings: Count = 4096
    use_bias: bool = True
    norm_epsilon: Positive = 1e-5
    layer_norm_eps: Positive = 1e-5
    norm_eps: Positive = 1e-5
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False


class _Starcoder2Config(_LayerNormConfig, frozen=True, kw_only=True):
    num_key_value_heads: Count | None = 2
    hidden_act: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True


class _StableLmConfig(_LayerNormConfig, frozen=True, kw_only=True):
    num_key_value_heads: Count | None = 32
    partial_rotary_factor: Share | None = 0.25


class _NemotronConfig(_LayerNormConfig, frozen=True, kw_only=True):
    hidden_act: str = "relu2"
    partial_rotary_factor: Share | None = 0.5


def _starcoder2(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Layer norms, biases everywhere, an MLP without a gate, one window for all layers."""
    fields = parse(config, _Starcoder2Config)
    bias = fields.use_bias
    own = replace(
        attention_of(fields), has_qkv_bias=bias, has_out_bias=bias, window=fields.sliding_window
    )
    return replace(
        _alike(fields, own, max_length),
        norm_kind="layer",
        has_norm_bias=True,
        norm_eps=fields.norm_epsilon,
        has_mlp_bias=bias,
        has_gate=False,
        naming="starcoder2",
    )


def _stablelm(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Layer norms, also of heads with weights of their own; MLPs may be in parallel."""
    fields = parse(config, _StableLmConfig)
    eps = fields.layer_norm_eps
    norm = HeadNormConfig(eps=eps, kind="layer", has_own_weights=True)
    own = replace(
        attention_of(fields),
        has_qkv_bias=fields.use_qkv_bias,
        has_out_bias=False,
        head_norm=norm if fields.qk_layernorm else None,
    )
    return replace(
        _alike(fields, own, max_length),
        norm_kind="layer",
        has_norm_bias=True,
        norm_eps=eps,
        is_parallel=fields.use_parallel_residual,
        naming="stablelm",
    )


def _nemotron(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Layer norms with centred weights, and an MLP without a gate."""
    fields = parse(config, _NemotronConfig)
    return replace(
        _alike(fields, attention_of(fields), max_length),
        norm_kind="layer",
        has_norm_bias=True,
        has_centred_norms=True,
        norm_eps=fields.norm_eps,
        has_gate=False,
    )


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "SeedOssForCausalLM": _seed_oss,
        "GraniteForCausalLM": granite,
        "HunYuanDenseV1ForCausalLM": hunyuan,
        "ApertusForCausalLM": _apertus,
        "ArceeForCausalLM": _arcee,
        "HeliumForCausalLM": _helium,
        "Starcoder2ForCausalLM": _starcoder2,
        "StableLmForCausalLM": _stablelm,
        "NemotronForCausalLM": _nemotron,
    }
)
