"""Cohere Command R: attention and MLP in parallel, layer norms without bias, adjacent pairs."""

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
    sliding_except,
)
from triptych.core.runtime.layers.attention import AttentionConfig, HeadNormConfig
from triptych.core.runtime.layers.decoder_layer import DecoderConfig


class _CohereConfig(CausalLmConfig, frozen=True, kw_only=True):
    layer_norm_eps: Positive = 1e-5
    logit_scale: Positive | None = 0.0625
    max_position_embeddings: Count = 8192
    rope_theta: Positive = 500_000.0
    tie_word_embeddings: bool = True
    use_qk_norm: bool | None = False


class _Cohere2Config(_CohereConfig, frozen=True, kw_only=True):
    rope_theta: Positive = 10_000.0
    sliding_window: Count | None = 4096
    sliding_window_pattern: Count = 4


def _cohere_of(
    fields: _CohereConfig, attention: tuple[AttentionConfig, ...], max_length: int
) -> DecoderConfig:
    return replace(
        decoder_of(fields, attention, max_length),
        norm_eps=fields.layer_norm_eps,
        norm_kind="layer",
        is_parallel=True,
        logit_scale=1.0 if fields.logit_scale is None else fields.logit_scale,
    )


def _cohere(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Each head may have a layer norm with weights of its own."""
    fields = parse(config, _CohereConfig)
    norm = HeadNormConfig(eps=fields.layer_norm_eps, kind="layer", has_own_weights=True)
    own = replace(
        attention_of(fields),
        head_norm=norm if fields.use_qk_norm else None,
        has_interleaved_rope=True,
    )
    return _cohere_of(fields, (own,) * fields.num_hidden_layers, max_length)


def _cohere2(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """A window in three of four layers; the others have no positions."""
    fields = parse(config, _Cohere2Config)
    windows = layer_windows(fields, sliding_except(fields, fields.sliding_window_pattern))
    base = replace(attention_of(fields), has_interleaved_rope=True)
    attention = tuple(
        replace(base, window=window, uses_rope=window is not None) for window in windows
    )
    return _cohere_of(fields, attention, max_length)


READERS: Mapping[str, Reader] = MappingProxyType(
    {"CohereForCausalLM": _cohere, "Cohere2ForCausalLM": _cohere2}
)
