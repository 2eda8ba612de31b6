"""gpt-oss: sinks, windows in every other layer, and experts with biases (arXiv:2508.10925)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from triptych.core.runtime.decoders.families.mixtures import with_experts
from triptych.core.runtime.decoders.hf_config import (
    CausalLmConfig,
    Count,
    Positive,
    Reader,
    RopeFields,
    attention_of,
    decoder_of,
    layer_windows,
    parse,
)
from triptych.core.runtime.kernels.gated import SwigluClamp
from triptych.core.runtime.kernels.routing import Routing
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.moe import MoeConfig

_ROPE = RopeFields(
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)


class _GptOssConfig(CausalLmConfig, frozen=True, kw_only=True):
    max_position_embeddings: Count = 131072
    rms_norm_eps: Positive = 1e-5
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 64
    attention_bias: bool = True
    rope_theta: Positive = 150_000.0
    rope_parameters: RopeFields | None = _ROPE
    sliding_window: Count | None = 128
    num_local_experts: Count = 128
    num_experts_per_tok: Count = 4
    swiglu_alpha: Positive = 1.702
    swiglu_limit: Positive = 7.0


def _gpt_oss(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Windows in the first of two layers; softmax over the chosen experts alone."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or _ROPE
    fields = parse({**config, "rope_parameters": scaling}, _GptOssConfig)
    windows = layer_windows(fields, tuple(n % 2 == 0 for n in range(fields.num_hidden_layers)))
    base = replace(attention_of(fields), has_sinks=True)
    moe = MoeConfig(
        num_experts=fields.num_local_experts,
        routing=Routing(num_chosen=fields.num_experts_per_tok),
        intermediate_size=fields.intermediate_size,
        has_router_bias=True,
        has_expert_bias=True,
        clamp=SwigluClamp(alpha=fields.swiglu_alpha, limit=fields.swiglu_limit),
        naming="gpt-oss",
    )
    attention = tuple(replace(base, window=window) for window in windows)
    return with_experts(decoder_of(fields, attention, max_length), moe)


READERS: Mapping[str, Reader] = MappingProxyType({"GptOssForCausalLM": _gpt_oss})
