"""Attention in some layers, recurrent ones in the others: Qwen3-Next, Qwen3.5, LFM2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from triptych.core.errors import WeightsError
from triptych.core.runtime.decoders.families.mixtures import with_experts
from triptych.core.runtime.decoders.families.qwen import with_axes
from triptych.core.runtime.decoders.hf_config import (
    CausalLmConfig,
    ConvolutionWidth,
    Count,
    Positive,
    Reader,
    StateHead,
    attention_of,
    check_silu,
    decoder_of,
    parse,
)
from triptych.core.runtime.kernels.routing import Routing
from triptych.core.runtime.layers.attention import HeadNormConfig
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.delta_net import DeltaNetConfig
from triptych.core.runtime.layers.mixers import MixerConfig
from triptych.core.runtime.layers.moe import MoeConfig
from triptych.core.runtime.layers.short_convolution import ShortConvConfig


class DeltaNetFields(CausalLmConfig, frozen=True, kw_only=True):
    """The fields of Qwen3.5, with its defaults."""

    head_dim: Count | None = 256
    num_key_value_heads: Count | None = 4
    max_position_embeddings: Count = 32768
    partial_rotary_factor: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = 0.25
    full_attention_interval: Count = 4
    linear_conv_kernel_dim: ConvolutionWidth = 4
    linear_key_head_dim: StateHead = 128
    linear_value_head_dim: StateHead = 128
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32


def delta_net_layers(fields: DeltaNetFields) -> tuple[MixerConfig, ...]:
    """Attention with an output gate in some layers, gated delta nets in the others."""
    norm = HeadNormConfig(eps=fields.rms_norm_eps, is_centred=True)
    attention = replace(attention_of(fields), head_norm=norm, has_output_gate=True)
    every = fields.full_attention_interval
    default = tuple(
        "linear_attention" if (layer + 1) % every else "full_attention"
        for layer in range(fields.num_hidden_layers)
    )
    kinds: dict[str, MixerConfig] = {
        "full_attention": attention,
        "linear_attention": delta_net_of(fields),
    }
    return layers_by_type(fields, fields.layer_types or default, kinds)


def delta_net_of(fields: DeltaNetFields) -> DeltaNetConfig:
    """The recurrent layer of these fields; families replace what differs."""
    check_silu(fields)
    if fields.linear_num_value_heads % fields.linear_num_key_heads:
        raise WeightsError("config.json: key heads do not serve value heads evenly.")
    return DeltaNetConfig(
        hidden_size=fields.hidden_size,
        num_key_heads=fields.linear_num_key_heads,
        num_value_heads=fields.linear_num_value_heads,
        key_dim=fields.linear_key_head_dim,
        value_dim=fields.linear_value_head_dim,
        width=fields.linear_conv_kernel_dim,
        norm_eps=fields.rms_norm_eps,
    )


def layers_by_type(
    fields: CausalLmConfig, layer_types: tuple[str, ...], kinds: Mapping[str, MixerConfig]
) -> tuple[MixerConfig, ...]:
    """The layers of these types. Raises `WeightsError` where none of them attends."""
    unknown = set(layer_types) - kinds.keys()
    if unknown:
        raise WeightsError(f"config.json: layer_types {sorted(unknown)} are not supported.")
    layers = tuple(kinds[kind] for kind in layer_types[: fields.num_hidden_layers])
    if kinds["full_attention"] not in layers:
        raise WeightsError("config.json: layer_types has no layer with attention.")
    return layers


def _qwen3_5(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    fields = parse(config, DeltaNetFields)
    decoder = decoder_of(fields, delta_net_layers(fields), max_length)
    return replace(decoder, has_centred_norms=True)


class _DeltaNetExperts(DeltaNetFields, frozen=True, kw_only=True):
    num_key_value_heads: Count | None = 2
    intermediate_size: Count = 5632
    num_experts: Count = 256
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 512
    shared_expert_intermediate_size: Count = 512
    norm_topk_prob: bool = True
    decoder_sparse_step: Count = 1
    mlp_only_layers: tuple[int, ...] | None = None


def _qwen3_5_moe(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Qwen3.5 with experts in every layer, always with weights whose sum is 1."""
    shared = config.get("shared_expert_intermediate_size", 512)
    own = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": None}
    return _with_delta_experts({"intermediate_size": shared, **config, **own}, max_length)


def _seeing(read: Reader) -> Reader:
    """The text part of a Qwen3.5 that sees, whose positions have three axes."""

    def reader(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
        decoder, fields = read(config, max_length), parse(config, _DeltaNetExperts)
        return with_axes(decoder, fields, (11, 11, 10), is_interleaved=True)

    return reader


def _qwen3_next(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """The same layers as Qwen3.5, whose projections are stored in another order."""
    defaults = {"num_experts": 512, "num_experts_per_tok": 10}
    decoder = _with_delta_experts(defaults | dict(config), max_length)
    return replace(decoder, naming="qwen3_next")


def _with_delta_experts(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    fields = parse(config, _DeltaNetExperts)
    layers, every = range(fields.num_hidden_layers), fields.decoder_sparse_step
    dense = fields.mlp_only_layers or ()
    moe = MoeConfig(
        num_experts=fields.num_experts,
        routing=Routing(num_chosen=fields.num_experts_per_tok, renormalizes=fields.norm_topk_prob),
        intermediate_size=fields.moe_intermediate_size,
        shared_size=fields.shared_expert_intermediate_size,
        has_shared_gate=True,
        dense_layers=frozenset(layer for layer in layers if layer in dense or (layer + 1) % every),
        naming="qwen3_next",
    )
    decoder = decoder_of(fields, delta_net_layers(fields), max_length)
    return replace(with_experts(decoder, moe), has_centred_norms=True)


class _Lfm2Config(CausalLmConfig, frozen=True, kw_only=True):
    intermediate_size: Count = 12288
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 128_000
    norm_eps: Positive = 1e-5
    rope_theta: Positive = 1_000_000.0
    tie_word_embeddings: bool = True
    tie_embedding: bool | None = None
    block_ff_dim: Count | None = None
    block_multiple_of: Count = 256
    block_ffn_dim_multiplier: Positive | None = 1.0
    block_auto_adjust_ff_dim: bool = True
    conv_bias: bool = False
    conv_L_cache: ConvolutionWidth = 3
    full_attn_idxs: tuple[int, ...] | None = None


def _lfm2(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Short convolutions between layers of attention with norms of heads."""
    fields = parse(config, _Lfm2Config)
    norm = HeadNormConfig(eps=fields.norm_eps)
    attention = replace(
        attention_of(fields), head_norm=norm, has_qkv_bias=False, has_out_bias=False
    )
    convolution = ShortConvConfig(
        hidden_size=fields.hidden_size, width=fields.conv_L_cache, has_bias=fields.conv_bias
    )
    layers = range(fields.num_hidden_layers)
    indexes = layers if fields.full_attn_idxs is None else fields.full_attn_idxs
    default = tuple("full_attention" if layer in indexes else "conv" for layer in layers)
    kinds: dict[str, MixerConfig] = {"full_attention": attention, "conv": convolution}
    decoder = decoder_of(
        fields, layers_by_type(fields, fields.layer_types or default, kinds), max_length
    )
    is_tied = fields.tie_word_embeddings if fields.tie_embedding is None else fields.tie_embedding
    return replace(
        decoder,
        norm_eps=fields.norm_eps,
        intermediate_size=_lfm2_size(fields),
        has_tied_embeddings=is_tied,
        naming="lfm2",
    )


class _Lfm2MoeConfig(_Lfm2Config, frozen=True, kw_only=True):
    intermediate_size: Count = 7168
    block_auto_adjust_ff_dim: bool = False
    num_experts: Count = 32
    num_experts_per_tok: Count = 4
    moe_intermediate_size: Count = 1792
    num_dense_layers: Annotated[int, msgspec.Meta(ge=0)] = 2
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 1.0


def _lfm2_moe(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """LFM2 with experts by sigmoid scores after the first layers."""
    fields = parse(config, _Lfm2MoeConfig)
    moe = MoeConfig(
        num_experts=fields.num_experts,
        routing=Routing(
            num_chosen=fields.num_experts_per_tok,
            scoring="sigmoid",
            renormalizes=fields.norm_topk_prob,
            scale=fields.routed_scaling_factor,
        ),
        intermediate_size=fields.moe_intermediate_size,
        has_correction=fields.use_expert_bias,
        dense_layers=frozenset(range(min(fields.num_dense_layers, fields.num_hidden_layers))),
        naming="lfm2",
    )
    plain = {**config, "block_auto_adjust_ff_dim": False}
    return with_experts(_lfm2(plain, max_length), moe)


def _lfm2_size(fields: _Lfm2Config) -> int:
    """The features of the MLP, which the configuration states before two thirds and rounding."""
    size = fields.block_ff_dim or fields.intermediate_size
    if not fields.block_auto_adjust_ff_dim:
        return size
    size = int((fields.block_ffn_dim_multiplier or 1.0) * int(2 * size / 3))
    return -(-size // fields.block_multiple_of) * fields.block_multiple_of


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "Lfm2ForCausalLM": _lfm2,
        "Lfm2MoeForCausalLM": _lfm2_moe,
        "Qwen3NextForCausalLM": _qwen3_next,
        "Qwen3_5ForCausalLM": _qwen3_5,
        "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
        "Qwen3_5TextModel": _seeing(_qwen3_5),
        "Qwen3_5MoeTextModel": _seeing(_qwen3_5_moe),
    }
)
