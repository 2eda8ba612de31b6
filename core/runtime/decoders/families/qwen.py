"""Qwen 2 and 3, with the text models of their vision models, and MiMo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from triptych.core.errors import WeightsError
from triptych.core.runtime.decoders.hf_config import (
    CausalLmConfig,
    Count,
    Reader,
    attention_of,
    decoder_of,
    layer_windows,
    parse,
)
from triptych.core.runtime.layers.attention import HeadNormConfig
from triptych.core.runtime.layers.decoder_layer import DecoderConfig


class Qwen2Config(CausalLmConfig, frozen=True, kw_only=True):
    """The fields of Qwen2, with its defaults."""

    sliding_window: Count | None = 4096
    max_position_embeddings: Count = 32768


class Qwen3Config(Qwen2Config, frozen=True, kw_only=True):
    """The fields of Qwen3, with its defaults."""

    head_dim: Count | None = 128


def _qwen2(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Biases on query, key and value; if enabled, a window from `max_window_layers` on."""
    fields = parse(config, Qwen2Config)
    base = replace(attention_of(fields), has_qkv_bias=True, has_out_bias=False)
    attention = tuple(replace(base, window=window) for window in _qwen_windows(fields))
    return decoder_of(fields, attention, max_length)


def _qwen3(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Qwen2 with a norm on every query and key head instead of biases."""
    fields = parse(config, Qwen3Config)
    base = replace(attention_of(fields), head_norm=HeadNormConfig(eps=fields.rms_norm_eps))
    attention = tuple(replace(base, window=window) for window in _qwen_windows(fields))
    return decoder_of(fields, attention, max_length)


def _qwen_windows(fields: CausalLmConfig) -> tuple[int | None, ...]:
    if not fields.use_sliding_window:
        return (None,) * fields.num_hidden_layers
    layers = range(fields.num_hidden_layers)
    return layer_windows(fields, tuple(layer >= fields.max_window_layers for layer in layers))


def _qwen2_vl(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Qwen2 with positions of three axes, each with a block of frequencies."""
    fields = parse(config, Qwen2Config)
    return with_axes(_qwen2(config, max_length), fields, (16, 24, 24))


def _qwen3_vl(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Qwen3 with positions of three axes, which alternate over the frequencies."""
    fields = parse(config, Qwen3Config)
    decoder = _qwen3(config, max_length)
    return with_axes(decoder, fields, (24, 20, 20), is_interleaved=True)


def with_axes(
    decoder: DecoderConfig,
    fields: CausalLmConfig,
    default: tuple[int, ...],
    *,
    is_interleaved: bool = False,
) -> DecoderConfig:
    """Give positions three axes. Raises `WeightsError` where they do not fit a head."""
    rope = fields.rope_parameters or fields.rope_scaling
    sections = (rope.mrope_section if rope else ()) or default
    if len(sections) != 3 or sum(sections) != decoder.rope.num_rotated_dims // 2:
        raise WeightsError(f"config.json: mrope_section {list(sections)} does not fit a head.")
    rope_config = replace(decoder.rope, sections=sections, has_interleaved_sections=is_interleaved)
    return replace(decoder, rope=rope_config)


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "Qwen2ForCausalLM": _qwen2,
        "Qwen3ForCausalLM": _qwen3,
        "MiMoForCausalLM": _qwen2,
        "Qwen2VLTextModel": _qwen2_vl,
        "Qwen2_5_VLTextModel": _qwen2_vl,
        "Qwen3VLTextModel": _qwen3_vl,
    }
)
