"""Latent attention: DeepSeek and its relatives.

A head's size is that of its rotated part, as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from triptych.core.runtime.decoders.hf_config import (
    CausalLmConfig,
    Count,
    Reader,
    decoder_of,
    parse,
)
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.latent_attention import LatentConfig


class LatentFields(CausalLmConfig, frozen=True, kw_only=True):
    """The fields of latent attention, with the defaults of DeepSeek-V3."""

    max_position_embeddings: Count = 4096
    q_lora_rank: Count | None = 1536
    kv_lora_rank: Count = 512
    qk_nope_head_dim: Count = 128
    qk_rope_head_dim: Count = 64
    v_head_dim: Count = 128
    rope_interleave: bool = True


F = TypeVar("F", bound=LatentFields)


def parse_latent(config: Mapping[str, Any], kind: type[F]) -> F:
    """Check `config` against `kind`. Raises `WeightsError` naming the field."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    rope_dim = config.get("qk_rope_head_dim", defaults["qk_rope_head_dim"])
    return parse({**config, "head_dim": rope_dim}, kind)


def latent_attention_of(fields: LatentFields) -> LatentConfig:
    """The attention that all layers share."""
    return LatentConfig(
        hidden_size=fields.hidden_size,
        num_heads=fields.num_attention_heads,
        nope_dim=fields.qk_nope_head_dim,
        rope_dim=fields.qk_rope_head_dim,
        value_dim=fields.v_head_dim,
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


def _youtu(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """DeepSeek-V3 without experts."""
    fields = parse_latent({"tie_word_embeddings": True, **config}, LatentFields)
    attention = (latent_attention_of(fields),) * fields.num_hidden_layers
    return decoder_of(fields, attention, max_length)


READERS: Mapping[str, Reader] = MappingProxyType({"YoutuForCausalLM": _youtu})
