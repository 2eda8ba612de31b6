"""Latent attention: DeepSeek and its relatives.

A head's size is that of its rotated part, as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace as replace_fields

from triptych.core.errors import WeightsError
from triptych.core.runtime.decoders.families.mixtures import with_experts
from triptych.core.runtime.decoders.hf_config import (
    CausalLmConfig,
    Count,
    NotNativeError,
    Positive,
    Reader,
    decoder_of,
    parse,
)
from triptych.core.runtime.kernels.routing import Routing
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.key_index import KeyIndexConfig
from triptych.core.runtime.layers.latent_attention import LatentConfig
from triptych.core.runtime.layers.moe import MoeConfig
from triptych.core.runtime.layers.rotary import QueryScaling


class LatentFields(CausalLmConfig, frozen=True, kw_only=True):
    """The fields of latent attention, with the defaults of DeepSeek-V3."""

    max_position_embeddings: Count = 4096
    q_lora_rank: Count | None = 1536
    kv_lora_rank: Count = 512
    qk_nope_head_dim: Count = 128
    qk_rope_head_dim: Count = 64
    v_head_dim: Count | None = 128
    rope_interleave: bool = True


F = TypeVar("F", bound=LatentFields)


def parse_latent(config: Mapping[str, Any], kind: type[F]) -> F:
    """Check `config` against `kind`. Raises `WeightsError` naming the field."""
    fields = _parse_sizes(config, kind)
    if any(share != 1.0 for share in _rotary_shares(fields)):
        raise NotNativeError("config.json: partial_rotary_factor is not 1 in latent attention.")
    return fields


def _parse_sizes(config: Mapping[str, Any], kind: type[F]) -> F:
    """The fields, of whose head a part is rotated: `head_dim` is that of the part."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    rope_dim = config.get("qk_rope_head_dim", defaults["qk_rope_head_dim"])
    return parse({**config, "head_dim": rope_dim}, kind)


def _rotary_shares(fields: LatentFields) -> list[float]:
    """The shares of a head that are rotated, as far as the configuration states them."""
    rope = fields.rope_parameters or fields.rope_scaling
    shares = fields.partial_rotary_factor, None if rope is None else rope.partial_rotary_factor
    return [share for share in shares if share is not None]


def latent_attention_of(fields: LatentFields) -> LatentConfig:
    """The attention that all layers share."""
    return LatentConfig(
        hidden_size=fields.hidden_size,
        num_heads=fields.num_attention_heads,
        nope_dim=fields.qk_nope_head_dim,
        rope_dim=fields.qk_rope_head_dim,
        value_dim=fields.v_head_dim or fields.hidden_size // fields.num_attention_heads,
        kv_rank=fields.kv_lora_rank,
        q_rank=fields.q_lora_rank,
        scale=_scale(fields),
        has_bias=fields.attention_bias,
        is_interleaved=fields.rope_interleave,
    )


def _scale(fields: LatentFields) -> float:
    """The scale of scores, which YaRN also changes (DeepSeek-V2; arXiv:2309.00071, eq. 22)."""
    scale = 1 / math.sqrt(fields.qk_nope_head_dim + fields.qk_rope_head_dim)
    rope = fields.rope_parameters or fields.rope_scaling
    kind = None if rope is None else rope.rope_type or rope.type
    if rope is None or kind in (None, "default") or not rope.mscale_all_dim:
        return scale
    growth = math.log(max(rope.factor or 1.0, 1.0))
    return scale * math.pow(0.1 * rope.mscale_all_dim * growth + 1.0, 2)


class DeepseekV3Fields(LatentFields, frozen=True, kw_only=True):
    """The fields of DeepSeek-V3's mixture besides, with its defaults."""

    n_routed_experts: Count = 256
    n_shared_experts: Annotated[int, msgspec.Meta(ge=0)] | None = 1
    moe_intermediate_size: Count = 2048
    num_experts_per_tok: Count = 8
    n_group: Count | None = 8
    topk_group: Count | None = 4
    routed_scaling_factor: Positive = 2.5
    norm_topk_prob: bool = True
    first_k_dense_replace: Annotated[int, msgspec.Meta(ge=0)] = 3
    mlp_layer_types: tuple[str, ...] | None = None
    num_nextn_predict_layers: Annotated[int, msgspec.Meta(ge=0)] | None = 1


class _DeepseekV2Config(DeepseekV3Fields, frozen=True, kw_only=True):
    max_position_embeddings: Count = 2048
    n_routed_experts: Count = 64
    n_shared_experts: Annotated[int, msgspec.Meta(ge=0)] | None = 2
    moe_intermediate_size: Count = 1407
    num_experts_per_tok: Count = 6
    n_group: Count | None = None
    topk_group: Count | None = None
    routed_scaling_factor: Positive = 1.0
    first_k_dense_replace: Annotated[int, msgspec.Meta(ge=0)] = 0
    num_nextn_predict_layers: Annotated[int, msgspec.Meta(ge=0)] | None = 0
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"


class _DeepseekV32Config(DeepseekV3Fields, frozen=True, kw_only=True):
    max_position_embeddings: Count = 163_840
    index_topk: Count = 2048
    index_head_dim: Count = 128
    index_n_heads: Count = 64


class _GlmMoeDsaConfig(_DeepseekV32Config, frozen=True, kw_only=True):
    max_position_embeddings: Count = 202_752
    rms_norm_eps: Positive = 1e-5
    q_lora_rank: Count | None = 2048
    qk_nope_head_dim: Count = 192
    v_head_dim: Count | None = 256
    n_group: Count | None = 1
    topk_group: Count | None = 1
    index_n_heads: Count = 32
    indexer_types: tuple[Literal["full", "shared"], ...] | None = None
    index_topk_pattern: str | tuple[Literal["full", "shared"], ...] | None = None
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2


class _Glm4MoeLiteConfig(DeepseekV3Fields, frozen=True, kw_only=True):
    max_position_embeddings: Count = 202752
    rms_norm_eps: Positive = 1e-5
    q_lora_rank: Count | None = 768
    qk_nope_head_dim: Count = 192
    v_head_dim: Count | None = 256
    n_routed_experts: Count = 64
    moe_intermediate_size: Count = 1536
    num_experts_per_tok: Count = 4
    n_group: Count | None = 1
    topk_group: Count | None = 1
    routed_scaling_factor: Positive = 1.8
    first_k_dense_replace: Annotated[int, msgspec.Meta(ge=0)] = 1


class _Mistral4Config(DeepseekV3Fields, frozen=True, kw_only=True):
    max_position_embeddings: Count = 1_048_576
    q_lora_rank: Count | None = 1024
    kv_lora_rank: Count = 256
    qk_nope_head_dim: Count = 64
    n_routed_experts: Count = 128
    num_experts_per_tok: Count = 4
    n_group: Count | None = 1
    topk_group: Count | None = 1
    routed_scaling_factor: Positive = 1.0
    first_k_dense_replace: Annotated[int, msgspec.Meta(ge=0)] = 0
    num_nextn_predict_layers: Annotated[int, msgspec.Meta(ge=0)] | None = 0


_MISTRAL4_ROPE = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
)
"""The default of the family."""


def _deepseek_v3(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    return by_corrected_scores(parse_latent(config, DeepseekV3Fields), max_length)


def _glm4_moe_lite(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """GLM-4.7-Flash: DeepSeek-V3 with other sizes."""
    return by_corrected_scores(parse_latent(config, _Glm4MoeLiteConfig), max_length)


def _deepseek_v32(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """DeepSeek-V3 with an index of keys in every layer, whose halves are rotated."""
    fields = parse_latent(config, _DeepseekV32Config)
    has_index = (True,) * fields.num_hidden_layers
    return _indexed(fields, max_length, has_index, is_interleaved=False)


def _glm_moe_dsa(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """GLM-5: DeepSeek-V3.2 with other sizes; layers may share the choice of an earlier one."""
    fields = parse_latent(config, _GlmMoeDsaConfig)
    has_index = tuple(kind == "full" for kind in _index_kinds(fields))
    return _indexed(fields, max_length, has_index, is_interleaved=True)


def _index_kinds(fields: _GlmMoeDsaConfig) -> Sequence[str]:
    """Whether each layer has its own index ("full"), as transformers finds it."""
    num_layers, stated = fields.num_hidden_layers, fields.indexer_types or fields.index_topk_pattern
    if stated is None:
        step, offset = max(fields.index_topk_freq, 1), fields.index_skip_topk_offset
        starts = (max(layer - offset + 1, 0) % step == 0 for layer in range(num_layers))
        return ["full" if is_start else "shared" for is_start in starts]
    kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in stated]
    if len(kinds) < num_layers or kinds[0] != "full" or not set(kinds) <= {"full", "shared"}:
        raise WeightsError(f"config.json: indexer_types {kinds} do not fit the layers.")
    return kinds[:num_layers]


def _indexed(
    fields: _DeepseekV32Config,
    max_length: int,
    has_index: Sequence[bool],
    *,
    is_interleaved: bool,
) -> DecoderConfig:
    """The model with an index in some layers; none where it would choose all keys of a context."""
    if fields.q_lora_rank is None:
        raise NotNativeError("config.json: q_lora_rank is missing, which an index of keys reads.")
    if fields.index_head_dim < fields.qk_rope_head_dim:
        raise WeightsError("config.json: index_head_dim is less than qk_rope_head_dim.")
    decoder = by_corrected_scores(replace_fields(fields, rope_interleave=True), max_length)
    if (max_length or fields.max_position_embeddings) <= fields.index_topk:
        return decoder
    index = KeyIndexConfig(
        num_heads=fields.index_n_heads,
        head_dim=fields.index_head_dim,
        num_chosen=fields.index_topk,
        is_interleaved=is_interleaved,
    )
    layers = zip(decoder.attending, has_index, strict=True)
    attention = [
        replace(layer, index=index if has_own else None)
        for layer, has_own in layers
        if isinstance(layer, LatentConfig)
    ]
    return replace(decoder, attention=tuple(attention))


def by_corrected_scores(fields: DeepseekV3Fields, max_length: int) -> DecoderConfig:
    """Latent attention in all layers; experts in groups, chosen by corrected sigmoid scores."""
    routing = Routing(
        num_chosen=fields.num_experts_per_tok,
        scoring="sigmoid",
        renormalizes=fields.norm_topk_prob,
        scale=fields.routed_scaling_factor,
        num_groups=fields.n_group or 1,
        num_chosen_groups=fields.topk_group or 1,
    )
    return _mixture(fields, routing, max_length, has_correction=True)


def _deepseek_v2(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Softmax scores, not normalized again; a group is as good as its best expert."""
    fields = parse_latent(config, _DeepseekV2Config)
    has_groups = fields.topk_method == "group_limited_greedy"
    routing = Routing(
        num_chosen=fields.num_experts_per_tok,
        renormalizes=False,
        scale=fields.routed_scaling_factor,
        num_groups=(fields.n_group or 1) if has_groups else 1,
        num_chosen_groups=(fields.topk_group or 1) if has_groups else 1,
        num_group_scores=1,
    )
    return _mixture(fields, routing, max_length, has_correction=False)


def _mistral4(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Softmax scores in groups, and queries that grow with their positions.

    `partial_rotary_factor` states the rotated part of a head, which the sizes of heads give, too.
    """
    stated = config.get("rope_parameters") or config.get("rope_scaling") or dict(_MISTRAL4_ROPE)
    fields = _parse_sizes({**config, "rope_parameters": stated}, _Mistral4Config)
    rope = fields.rope_parameters
    assert rope is not None
    head_dim = fields.qk_nope_head_dim + fields.qk_rope_head_dim
    if any(round(share * head_dim) != fields.qk_rope_head_dim for share in _rotary_shares(fields)):
        raise NotNativeError("config.json: partial_rotary_factor is not that of qk_rope_head_dim.")
    rope = replace_fields(rope, partial_rotary_factor=None)
    fields = replace_fields(fields, rope_parameters=rope, partial_rotary_factor=None)
    routing = Routing(
        num_chosen=fields.num_experts_per_tok,
        renormalizes=fields.norm_topk_prob,
        scale=fields.routed_scaling_factor,
        num_groups=fields.n_group or 1,
        num_chosen_groups=fields.topk_group or 1,
    )
    decoder = _mixture(fields, routing, max_length, has_correction=False, naming="mistral4")
    if rope.llama_4_scaling_beta is None:
        return decoder
    scaling = QueryScaling(beta=rope.llama_4_scaling_beta, length=decoder.rope.trained_length)
    attention = (replace(latent_attention_of(fields), scales_queries=True),) * len(
        decoder.attention
    )
    return replace(decoder, attention=attention, query_scaling=scaling)


def _mixture(
    fields: DeepseekV3Fields,
    routing: Routing,
    max_length: int,
    *,
    has_correction: bool,
    naming: str = "",
) -> DecoderConfig:
    moe = MoeConfig(
        num_experts=fields.n_routed_experts,
        routing=routing,
        intermediate_size=fields.moe_intermediate_size,
        shared_size=fields.moe_intermediate_size * (fields.n_shared_experts or 0),
        has_correction=has_correction,
        naming=naming,
        dense_layers=_dense_layers(fields),
    )
    attention = (latent_attention_of(fields),) * fields.num_hidden_layers
    decoder = with_experts(decoder_of(fields, attention, max_length), moe)
    return replace(decoder, num_draft_layers=fields.num_nextn_predict_layers or 0)


def _dense_layers(fields: DeepseekV3Fields) -> frozenset[int]:
    kinds, num_layers = fields.mlp_layer_types, fields.num_hidden_layers
    if kinds is None:
        return frozenset(range(min(fields.first_k_dense_replace, num_layers)))
    if len(kinds) < num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise WeightsError(f"config.json: mlp_layer_types {list(kinds)} do not fit the layers.")
    return frozenset(layer for layer in range(num_layers) if kinds[layer] == "dense")


def _youtu(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """DeepSeek-V3 without experts."""
    fields = parse_latent({"tie_word_embeddings": True, **config}, LatentFields)
    attention = (latent_attention_of(fields),) * fields.num_hidden_layers
    return decoder_of(fields, attention, max_length)


class _MiniCpm3Config(LatentFields, frozen=True, kw_only=True):
    max_position_embeddings: Count = 32768
    rms_norm_eps: Positive = 1e-5
    tie_word_embeddings: bool = True
    q_lora_rank: Count | None = 768
    kv_lora_rank: Count = 256
    qk_nope_head_dim: Count = 64
    qk_rope_head_dim: Count = 32
    v_head_dim: Count | None = None
    rope_interleave: bool = False
    scale_emb: Positive = 12.0
    scale_depth: Positive | None = 1.4
    dim_model_base: Count | None = 256


def _minicpm3(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Dense, with scaled embeddings, residual additions and logits."""
    fields = parse_latent(config, _MiniCpm3Config)
    num_layers, hidden_size = fields.num_hidden_layers, fields.hidden_size
    attention = (latent_attention_of(fields),) * num_layers
    depth = fields.scale_depth or math.sqrt(num_layers)
    return replace(
        decoder_of(fields, attention, max_length),
        embedding_scale=fields.scale_emb,
        residual_scale=depth / math.sqrt(num_layers),
        logit_scale=(fields.dim_model_base or hidden_size) / hidden_size,
    )


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": _deepseek_v2,
        "DeepseekV3ForCausalLM": _deepseek_v3,
        "DeepseekV32ForCausalLM": _deepseek_v32,
        "Glm4MoeLiteForCausalLM": _glm4_moe_lite,
        "GlmMoeDsaForCausalLM": _glm_moe_dsa,
        "MiniCPM3ForCausalLM": _minicpm3,
        "Mistral4ForCausalLM": _mistral4,
        "YoutuForCausalLM": _youtu,
    }
)
"""Kimi K2 declares itself DeepSeek-V3."""
