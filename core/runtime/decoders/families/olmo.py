"""OLMo 2 and 3, OLMo hybrid, and EXAONE 4: norms after attention and MLP alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from triptych.core.runtime.decoders.families.recurrent import (
    DeltaNetFields,
    delta_net_of,
    layers_by_type,
)
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
from triptych.core.runtime.layers.delta_net import DeltaNetConfig
from triptych.core.runtime.layers.mixers import MixerConfig


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
    fields: CausalLmConfig, layers: tuple[MixerConfig, ...], max_length: int
) -> DecoderConfig:
    decoder = decoder_of(fields, layers, max_length)
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


class _LinearSizes(CausalLmConfig, frozen=True, kw_only=True):
    linear_num_key_heads: Count | None = None
    linear_num_value_heads: Count | None = None
    linear_key_head_dim: Count | None = None
    linear_value_head_dim: Count | None = None

    def stated(self) -> dict[str, int]:
        """All four sizes, by name: those that a configuration leaves out follow from others."""
        num_keys = self.linear_num_key_heads or self.num_attention_heads
        key_dim = self.linear_key_head_dim or int(0.75 * self.hidden_size / num_keys)
        return {
            "linear_num_key_heads": num_keys,
            "linear_num_value_heads": self.linear_num_value_heads or self.num_attention_heads,
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": self.linear_value_head_dim or 2 * key_dim,
        }


class _OlmoHybridConfig(DeltaNetFields, frozen=True, kw_only=True):
    head_dim: Count | None = None
    num_key_value_heads: Count | None = None
    max_position_embeddings: Count = 65536
    partial_rotary_factor: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    linear_allow_neg_eigval: bool = True


_RESULT_EPS = 1e-5
"""Of the norm of a recurrent layer's result, whatever the configuration says."""


def _olmo_hybrid(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Gated delta nets between layers of OLMo 3, with norms before them and their MLPs."""
    given = {name: value for name, value in config.items() if value is not None}
    sizes = parse(given, _LinearSizes).stated()
    fields = parse({**given, **sizes}, _OlmoHybridConfig)
    kinds: dict[str, MixerConfig] = {
        "full_attention": replace(_olmo_attention(fields), uses_rope=_has_theta(config)),
        "linear_attention": replace(
            delta_net_of(fields),
            norm_eps=_RESULT_EPS,
            beta_scale=2.0 if fields.linear_allow_neg_eigval else 1.0,
        ),
    }
    default = sliding_except(fields, 4)
    types = fields.layer_types or tuple(
        "linear_attention" if is_linear else "full_attention" for is_linear in default
    )
    layers = layers_by_type(fields, types, kinds)
    pre_normed = frozenset(i for i, layer in enumerate(layers) if isinstance(layer, DeltaNetConfig))
    decoder = _normed_after(fields, layers, max_length)
    return replace(decoder, pre_normed=pre_normed, naming="olmo_hybrid")


def _has_theta(config: Mapping[str, Any]) -> bool:
    """Whether heads are rotated: not if the base of their frequencies is null."""
    places = (config.get("rope_parameters") or {}, config)
    stated = [place["rope_theta"] for place in places if "rope_theta" in place]
    return not stated or stated[0] is not None


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
        "OlmoHybridForCausalLM": _olmo_hybrid,
        "Exaone4ForCausalLM": _exaone4,
    }
)
