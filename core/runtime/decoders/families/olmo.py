"""OLMo 2 and 3, and EXAONE 4: norms after attention and MLP alone."""

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
    parse_by_layer_type,
    rope_of,
    sliding_except,
)
from triptych.core.runtime.layers.attention import AttentionConfig, HeadNormConfig
from triptych.core.runtime.layers.decoder_layer import DecoderConfig


class _OlmoConfig(CausalLmConfig, frozen=True, kw_only=True):
    rms_norm_eps: Positive = 1e-5


class _Olmo3Config(_OlmoConfig, frozen=True, kw_only=True):
    rope_theta: Positive = 500_000.0
    sliding_window: Count | None = 4096


class _Exaone4Config(CausalLmConfig, frozen=True, kw_only=True):
    num_key_value_heads: Count | None = 32
    rms_norm_eps: Positive = 1e-5
    sliding_window: Count | None = 4096
    sliding_window_pattern: int | str | None = 4


def _normed_after(
    fields: CausalLmConfig, attention: tuple[AttentionConfig, ...], max_length: int
) -> DecoderConfig:
    decoder = decoder_of(fields, attention, max_length)
    return replace(decoder, has_pre_norms=False, has_post_norms=True)


def _olmo_attention(fields: CausalLmConfig) -> AttentionConfig:
    """All query heads are normalized as one row, and all key heads."""
    norm = HeadNormConfig(eps=fields.rms_norm_eps, is_joint=True)
    return replace(attention_of(fields), head_norm=norm)


def _olmo2(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    fields = parse(config, _OlmoConfig)
    attention = (_olmo_attention(fields),) * fields.num_hidden_layers
    return _normed_after(fields, attention, max_length)


def _olmo3(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """OLMo 2 with a window in three of four layers, whose rotation is not scaled."""
    fields, local = parse_by_layer_type(config, _Olmo3Config)
    windows = layer_windows(fields, sliding_except(fields, 4))
    base = _olmo_attention(fields)
    attention = tuple(
        replace(base, window=window, uses_local_rope=window is not None) for window in windows
    )
    decoder = _normed_after(fields, attention, max_length)
    return replace(decoder, local_rope=rope_of(local, max_length))


def _exaone4(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Norms on heads; layers without a window have no positions, if others have a window."""
    fields = parse(config, _Exaone4Config)
    every = fields.sliding_window_pattern
    every = every if isinstance(every, int) and fields.sliding_window else 0
    windows = layer_windows(fields, sliding_except(fields, every))
    base = replace(
        attention_of(fields),
        has_qkv_bias=False,
        has_out_bias=False,
        head_norm=HeadNormConfig(eps=fields.rms_norm_eps),
    )
    has_windows = fields.sliding_window is not None
    attention = tuple(
        replace(base, window=window, uses_rope=not has_windows or window is not None)
        for window in windows
    )
    return _normed_after(fields, attention, max_length)


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "Olmo2ForCausalLM": _olmo2,
        "Olmo3ForCausalLM": _olmo3,
        "Exaone4ForCausalLM": _exaone4,
    }
)
