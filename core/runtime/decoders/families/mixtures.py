"""Mixtures of experts by softmax: Mixtral, Qwen-MoE, OLMoE, Granite-MoE, Hunyuan-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Protocol

import msgspec

from triptych.core.errors import WeightsError
from triptych.core.runtime.decoders.families.llama import MistralConfig
from triptych.core.runtime.decoders.families.qwen import Qwen2Config, Qwen3Config
from triptych.core.runtime.decoders.families.relatives import granite, hunyuan
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
from triptych.core.runtime.layers.attention import HeadNormConfig
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.moe import MoeConfig

Some = Annotated[int, msgspec.Meta(ge=0)]


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


class _Qwen2MoeConfig(Qwen2Config, frozen=True, kw_only=True):
    num_key_value_heads: Count | None = 16
    num_experts: Count = 60
    num_experts_per_tok: Count = 4
    moe_intermediate_size: Count = 1408
    shared_expert_intermediate_size: Count = 5632
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: tuple[int, ...] | None = None
    qkv_bias: bool = True


class _OlmoeConfig(CausalLmConfig, frozen=True, kw_only=True):
    max_position_embeddings: Count = 4096
    rms_norm_eps: Positive = 1e-5
    num_experts: Count = 64
    num_experts_per_tok: Count = 8
    norm_topk_prob: bool = False
    clip_qkv: float | None = None


class _GraniteMoeConfig(CausalLmConfig, frozen=True, kw_only=True):
    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2
    shared_intermediate_size: Some = 0


class _HunyuanMoeConfig(CausalLmConfig, frozen=True, kw_only=True):
    num_experts: Count | tuple[Count, ...] = 1
    moe_topk: Count | tuple[Count, ...] = 1


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


class _SparseFields(Protocol):
    """Which layers of Qwen's mixtures have experts."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def decoder_sparse_step(self) -> int: ...
    @property
    def mlp_only_layers(self) -> tuple[int, ...] | None: ...


def _dense_layers(fields: _SparseFields) -> frozenset[int]:
    layers, every = range(fields.num_hidden_layers), fields.decoder_sparse_step
    dense = fields.mlp_only_layers or ()
    return frozenset(layer for layer in layers if layer in dense or (layer + 1) % every)


def _qwen3_moe(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Qwen3 with experts in most layers."""
    fields = parse(config, _Qwen3MoeConfig)
    moe = MoeConfig(
        num_experts=fields.num_local_experts or fields.num_experts,
        routing=Routing(num_chosen=fields.num_experts_per_tok, renormalizes=fields.norm_topk_prob),
        intermediate_size=fields.moe_intermediate_size,
        dense_layers=_dense_layers(fields),
    )
    window = fields.sliding_window if fields.use_sliding_window else None
    base = replace(
        attention_of(fields), head_norm=HeadNormConfig(eps=fields.rms_norm_eps), window=window
    )
    attention = (base,) * fields.num_hidden_layers
    return with_experts(decoder_of(fields, attention, max_length), moe)


def _qwen2_moe(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Qwen2 with experts, and a shared one behind a gate, in most layers."""
    window = config.get("sliding_window") or None  # files have 0 where it is not used
    fields = parse({**config, "sliding_window": window}, _Qwen2MoeConfig)
    moe = MoeConfig(
        num_experts=fields.num_experts,
        routing=Routing(num_chosen=fields.num_experts_per_tok, renormalizes=fields.norm_topk_prob),
        intermediate_size=fields.moe_intermediate_size,
        shared_size=fields.shared_expert_intermediate_size,
        has_shared_gate=True,
        dense_layers=_dense_layers(fields),
        naming="qwen2",
    )
    base = replace(attention_of(fields), has_qkv_bias=fields.qkv_bias, has_out_bias=False)
    layers, last = range(fields.num_hidden_layers), fields.max_window_layers
    sliding = tuple(
        fields.use_sliding_window and layer % 2 == 0 and layer < last for layer in layers
    )
    attention = tuple(replace(base, window=window) for window in layer_windows(fields, sliding))
    return with_experts(decoder_of(fields, attention, max_length), moe)


def _olmoe(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Norms of all heads together; experts in every layer."""
    fields = parse(config, _OlmoeConfig)
    if fields.clip_qkv is not None:
        raise NotNativeError("config.json: clip_qkv is not supported.")
    moe = MoeConfig(
        num_experts=fields.num_experts,
        routing=Routing(num_chosen=fields.num_experts_per_tok, renormalizes=fields.norm_topk_prob),
        intermediate_size=fields.intermediate_size,
    )
    head_norm = HeadNormConfig(eps=fields.rms_norm_eps, is_joint=True)
    attention = (replace(attention_of(fields), head_norm=head_norm),) * fields.num_hidden_layers
    return with_experts(decoder_of(fields, attention, max_length), moe)


def _granite_moe(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Granite with experts in every layer, and perhaps a shared one."""
    fields = parse(config, _GraniteMoeConfig)
    moe = MoeConfig(
        num_experts=fields.num_local_experts,
        routing=Routing(num_chosen=fields.num_experts_per_tok),
        intermediate_size=fields.intermediate_size,
        shared_size=fields.shared_intermediate_size,
        naming="granite",
    )
    return with_experts(granite(config, max_length), moe)


def _hunyuan_moe(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Hunyuan with experts in every layer, each of the size of the shared one."""
    fields = parse(config, _HunyuanMoeConfig)
    moe = MoeConfig(
        num_experts=_same_in_all_layers("num_experts", fields.num_experts),
        routing=Routing(num_chosen=_same_in_all_layers("moe_topk", fields.moe_topk)),
        intermediate_size=fields.intermediate_size,
        shared_size=fields.intermediate_size,
        naming="hunyuan",
    )
    return with_experts(hunyuan(config, max_length), moe)


def _same_in_all_layers(name: str, values: int | tuple[int, ...]) -> int:
    listed = set(values) if isinstance(values, tuple) else {values}
    if len(listed) != 1:
        raise NotNativeError(f"config.json: {name} must be the same in all layers.")
    return listed.pop()


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
        "Qwen2MoeForCausalLM": _qwen2_moe,
        "Qwen3MoeForCausalLM": _qwen3_moe,
        "OlmoeForCausalLM": _olmoe,
        "GraniteMoeForCausalLM": _granite_moe,
        "GraniteMoeSharedForCausalLM": _granite_moe,
        "HunYuanMoEV1ForCausalLM": _hunyuan_moe,
    }
)
