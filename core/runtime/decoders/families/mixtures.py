"""Mixtures of experts: Mixtral, Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from triptych.core.errors import WeightsError
from triptych.core.runtime.decoders.families.llama import MistralConfig
from triptych.core.runtime.decoders.families.qwen import Qwen3Config
from triptych.core.runtime.decoders.hf_config import (
    Count,
    Reader,
    attention_of,
    decoder_of,
    parse,
)
from triptych.core.runtime.kernels.routing import Routing
from triptych.core.runtime.layers.attention import HeadNormConfig
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.moe import MoeConfig


class _MixtralConfig(MistralConfig, frozen=True, kw_only=True):
    sliding_window: Count | None = None
    rope_theta: float = 1_000_000.0
    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2


class _Qwen3MoeConfig(Qwen3Config, frozen=True, kw_only=True):
    head_dim: Count | None = None
    num_key_value_heads: Count | None = 4
    num_experts: Count = 128
    num_local_experts: Count | None = None  # the same, as newer transformers writes it
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: tuple[int, ...] | None = None


def _mixtral(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Mistral with experts in every layer."""
    fields = parse(config, _MixtralConfig)
    moe = MoeConfig(
        num_experts=fields.num_local_experts,
        routing=Routing(num_chosen=fields.num_experts_per_tok),
        intermediate_size=fields.intermediate_size,
        naming="mixtral",
    )
    base = replace(attention_of(fields), has_qkv_bias=False, has_out_bias=False)
    attention = (replace(base, window=fields.sliding_window),) * fields.num_hidden_layers
    return with_experts(decoder_of(fields, attention, max_length), moe)


def _qwen3_moe(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Qwen3 with experts in most layers."""
    fields = parse(config, _Qwen3MoeConfig)
    layers, every = range(fields.num_hidden_layers), fields.decoder_sparse_step
    dense = fields.mlp_only_layers or ()
    moe = MoeConfig(
        num_experts=fields.num_local_experts or fields.num_experts,
        routing=Routing(num_chosen=fields.num_experts_per_tok, renormalizes=fields.norm_topk_prob),
        intermediate_size=fields.moe_intermediate_size,
        dense_layers=frozenset(layer for layer in layers if layer in dense or (layer + 1) % every),
    )
    window = fields.sliding_window if fields.use_sliding_window else None
    base = replace(
        attention_of(fields), head_norm=HeadNormConfig(eps=fields.rms_norm_eps), window=window
    )
    attention = (base,) * fields.num_hidden_layers
    return with_experts(decoder_of(fields, attention, max_length), moe)


def with_experts(decoder: DecoderConfig, moe: MoeConfig) -> DecoderConfig:
    """The decoder with a mixture. Raises `WeightsError` for rules its experts cannot follow."""
    _check_routing(moe.routing, moe.num_experts)
    return replace(decoder, moe=moe)


def _check_routing(routing: Routing, num_experts: int) -> None:
    num_groups, num_chosen_groups = routing.num_groups, routing.num_chosen_groups
    if num_experts % num_groups or num_chosen_groups > num_groups:
        raise WeightsError(
            f"config.json: cannot choose {num_chosen_groups} of {num_groups} groups of"
            f" {num_experts} experts."
        )
    group_size = num_experts // num_groups
    if routing.num_chosen > num_chosen_groups * group_size:
        raise WeightsError(
            f"config.json: cannot choose {routing.num_chosen} of {num_experts} experts for a token."
        )
    if routing.is_limited and routing.num_group_scores > group_size:
        raise WeightsError(
            f"config.json: groups of {group_size} experts cannot be ranked by"
            f" {routing.num_group_scores} of them."
        )


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "MixtralForCausalLM": _mixtral,
        "Qwen3MoeForCausalLM": _qwen3_moe,
    }
)
