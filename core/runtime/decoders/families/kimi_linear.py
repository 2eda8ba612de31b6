"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in the rest.

The first layers have an MLP, the others DeepSeek-V3's mixture. Configurations have their own names
for its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from triptych.core.runtime.decoders.families.deepseek import (
    DeepseekV3Fields,
    by_corrected_scores,
    latent_attention_of,
    parse_latent,
)
from triptych.core.runtime.decoders.families.recurrent import layers_by_type
from triptych.core.runtime.decoders.hf_config import (
    ConvolutionWidth,
    Count,
    NotNativeError,
    Positive,
    Reader,
    StateHead,
    check_silu,
)
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.delta_net import DeltaNetConfig
from triptych.core.runtime.layers.mixers import MixerConfig

_SAME_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    }
)
"""The names in configurations of what DeepSeek-V3 calls otherwise."""
_UNUSED: Mapping[str, Any] = MappingProxyType(
    {"rope_parameters": None, "rope_scaling": None, "tie_word_embeddings": False}
)
"""Nothing is rotated, and the head has weights of its own, whatever a configuration says."""


class _LinearAttention(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `linear_attn_config`; layers count from 1."""

    head_dim: StateHead | None = None
    num_heads: Count | None = None
    short_conv_kernel_size: ConvolutionWidth | None = None
    full_attn_layers: tuple[int, ...] | None = None


class _KimiLinearFields(DeepseekV3Fields, frozen=True, kw_only=True):
    max_position_embeddings: Count = 1_048_576
    rms_norm_eps: Positive = 1e-5
    q_lora_rank: Count | None = None
    n_group: Count | None = 1
    topk_group: Count | None = 1
    moe_intermediate_size: Count = 1024
    routed_scaling_factor: Positive = 2.446
    first_k_dense_replace: Annotated[int, msgspec.Meta(ge=0)] = 1
    num_nextn_predict_layers: Annotated[int, msgspec.Meta(ge=0)] | None = 0
    linear_head_dim: StateHead = 128
    linear_num_heads: Count = 32
    linear_conv_kernel_dim: ConvolutionWidth = 4
    linear_attn_config: _LinearAttention | None = None
    mla_use_nope: bool = True


def _kimi_linear(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    same = {new: config[old] for old, new in _SAME_FIELDS.items() if old in config}
    fields = parse_latent({**config, **same, **_UNUSED}, _KimiLinearFields)
    check_silu(fields)
    if not fields.mla_use_nope:
        raise NotNativeError("config.json: mla_use_nope is false, which is not supported.")
    kinds: dict[str, MixerConfig] = {
        "full_attention": replace(latent_attention_of(fields), is_interleaved=False),
        "linear_attention": _delta_attention(fields),
    }
    layers = layers_by_type(fields, fields.layer_types or _layer_types(fields), kinds)
    decoder = by_corrected_scores(fields, max_length)
    assert decoder.moe is not None
    return replace(
        decoder,
        attention=layers,
        rope=replace(decoder.rope, kind="proportional", share=0.0),  # nothing is rotated
        moe=replace(decoder.moe, naming="kimi_linear"),
        naming="kimi_linear",
    )


def _delta_attention(fields: _KimiLinearFields) -> DeltaNetConfig:
    own = fields.linear_attn_config or _LinearAttention()
    num_heads, head_dim = own.num_heads or fields.linear_num_heads, own.head_dim
    head_dim = head_dim or fields.linear_head_dim
    return DeltaNetConfig(
        hidden_size=fields.hidden_size,
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        width=own.short_conv_kernel_size or fields.linear_conv_kernel_dim,
        norm_eps=fields.rms_norm_eps,
        has_key_decays=True,
        low_rank=head_dim,
        gate="sigmoid",
    )


def _layer_types(fields: _KimiLinearFields) -> tuple[str, ...]:
    own, layers = fields.linear_attn_config, range(fields.num_hidden_layers)
    attending = [layer for layer in layers if layer and layer % 4 == 0]
    if own is not None and own.full_attn_layers is not None:
        attending = [layer - 1 for layer in own.full_attn_layers]
    return tuple("full_attention" if layer in attending else "linear_attention" for layer in layers)


READERS: Mapping[str, Reader] = MappingProxyType({"KimiLinearForCausalLM": _kimi_linear})
