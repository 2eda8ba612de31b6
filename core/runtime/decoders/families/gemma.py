"""Gemma 1 to 4, and 3n."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec

from triptych.core.errors import WeightsError
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
    parse_by_layer_type,
    rope_of,
    sliding_except,
)
from triptych.core.runtime.layers.altup import MAX_STREAMS, AltUpConfig
from triptych.core.runtime.layers.attention import AttentionConfig, HeadNormConfig
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.layer_inputs import LayerInputConfig

Size = Annotated[int, msgspec.Meta(ge=0, le=2**24)]
Sparsity = Annotated[float, msgspec.Meta(ge=0, lt=1)]


N = TypeVar("N", int, float)


class _GemmaConfig(CausalLmConfig, frozen=True, kw_only=True):
    hidden_act: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    max_position_embeddings: Count = 8192
    head_dim: Count | None = 256
    num_key_value_heads: Count | None = 16
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    query_pre_attn_scalar: Positive | None = None


class _Gemma2Config(_GemmaConfig, frozen=True, kw_only=True):
    num_key_value_heads: Count | None = 4
    sliding_window: Count | None = 4096
    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0
    query_pre_attn_scalar: Positive | None = 256


class _Gemma3Config(_GemmaConfig, frozen=True, kw_only=True):
    num_key_value_heads: Count | None = 4
    max_position_embeddings: Count = 131_072
    sliding_window: Count | None = 4096
    sliding_window_pattern: Count = 6
    query_pre_attn_scalar: Positive | None = 256
    rope_theta: Positive = 1_000_000.0
    rope_local_base_freq: Positive = 10_000.0


class _LayerFields(msgspec.Struct, frozen=True):
    """The numbers that a layer of Gemma 4 may have in place of those of most."""

    head_dim: Count | None = None
    num_key_value_heads: Count | None = None


class _InputsConfig(_GemmaConfig, frozen=True, kw_only=True):
    """The fields of models whose layers have their own inputs and may share keys and values."""

    sliding_window: Count | None = 512
    rope_theta: Positive = 1_000_000.0
    num_kv_shared_layers: Size = 0
    hidden_size_per_layer_input: Size = 256
    vocab_size_per_layer_input: Count = 262_144


class _Gemma3nConfig(_InputsConfig, frozen=True, kw_only=True):
    num_key_value_heads: Count | None = 2
    max_position_embeddings: Count = 32_768
    final_logit_softcapping: Positive | None = 30.0
    num_kv_shared_layers: Size = 15
    altup_active_idx: int = 0
    altup_correct_scale: bool = True
    altup_num_inputs: Annotated[int, msgspec.Meta(ge=2, le=MAX_STREAMS)] = 4
    laurel_rank: Count = 64
    activation_sparsity_pattern: tuple[Sparsity, ...] | None = None
    mlp_sizes: tuple[Count, ...] | None = None
    """`intermediate_size` where a file has it by layer."""


class _Gemma4Config(_InputsConfig, frozen=True, kw_only=True):
    num_key_value_heads: Count | None = 4
    max_position_embeddings: Count = 131_072
    global_head_dim: Count | None = 512
    num_global_key_value_heads: Count | None = None
    per_layer_config: dict[str, _LayerFields] | None = None
    attention_k_eq_v: bool = False
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False

    def of_full_layer(self) -> _LayerFields:
        """The sizes of layers without a window: all the same."""
        layers = self.per_layer_config
        if layers is None:
            heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
            return _LayerFields(self.global_head_dim, heads)
        kinds = list(dict.fromkeys(layers.values()))
        if len(kinds) > 1:
            raise NotNativeError("config.json: per_layer_config has layers of several kinds.")
        return kinds[0] if kinds else _LayerFields()


def _named(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with the activation under its usual name."""
    named = config.get("hidden_activation")
    return config if named is None else {**config, "hidden_act": named}


def _gemma_of(
    fields: _GemmaConfig, attention: tuple[AttentionConfig, ...], max_length: int
) -> DecoderConfig:
    """The parts that all versions share: scaled embeddings, a GeGLU, caps on logits."""
    return replace(
        decoder_of(fields, attention, max_length),
        embedding_scale=fields.hidden_size**0.5,
        logit_cap=fields.final_logit_softcapping,
    )


def _gemma(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Version 1, whose norms have centred weights."""
    fields = parse(_named(config), _GemmaConfig)
    if fields.attn_logit_softcapping:
        raise WeightsError("config.json: attn_logit_softcapping is not one of this model's fields.")
    attention = (attention_of(fields),) * fields.num_hidden_layers
    return replace(_gemma_of(fields, attention, max_length), has_centred_norms=True)


def _capped(fields: _GemmaConfig) -> AttentionConfig:
    """Attention with scores of another scale, and limited."""
    scalar = fields.query_pre_attn_scalar
    return replace(
        attention_of(fields),
        scale=None if scalar is None else scalar**-0.5,
        soft_cap=fields.attn_logit_softcapping,
    )


def _gemma2(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Gemma with norms after attention and MLP, soft caps, and a window in every other layer."""
    fields = parse(_named(config), _Gemma2Config)
    base = _capped(fields)
    windows = layer_windows(fields, sliding_except(fields, 2))
    attention = tuple(replace(base, window=window) for window in windows)
    decoder = _gemma_of(fields, attention, max_length)
    return replace(decoder, has_centred_norms=True, has_post_norms=True)


def _gemma3(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Gemma 2 with norms on heads, and a window in most layers, which have their own rotation."""
    fields, local = parse_by_layer_type(_with_bases(_named(config)), _Gemma3Config)
    windows = layer_windows(fields, sliding_except(fields, fields.sliding_window_pattern))
    norm = HeadNormConfig(eps=fields.rms_norm_eps, is_centred=True)
    base = replace(_capped(fields), head_norm=norm)
    attention = tuple(
        replace(base, window=window, uses_local_rope=window is not None) for window in windows
    )
    decoder = _gemma_of(fields, attention, max_length)
    rope = rope_of(local, max_length)
    return replace(decoder, local_rope=rope, has_centred_norms=True, has_post_norms=True)


def _with_bases(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with the base of frequencies of layers with windows."""
    return {"rope_local_base_freq": 10_000.0, **config}


def _gemma3n(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Gemma 3 with inputs of layers, several residual streams and sparse activations."""
    named = dict(_with_bases(_named(config)))
    if isinstance(sizes := named.get("intermediate_size"), list) and sizes:
        named |= {"intermediate_size": sizes[0], "mlp_sizes": sizes}
    fields, local = parse_by_layer_type(named, _Gemma3nConfig)
    if fields.altup_active_idx or not fields.altup_correct_scale:
        raise NotNativeError(
            "config.json: altup_active_idx must be 0 and altup_correct_scale true."
        )
    inputs = _layer_inputs(fields)
    if inputs is None:
        raise NotNativeError("config.json: hidden_size_per_layer_input 0 is not supported.")
    return replace(
        _gemma_of(fields, _gemma3n_attention(fields), max_length),
        local_rope=rope_of(local, max_length),
        has_post_norms=True,
        intermediate_size=max(fields.mlp_sizes or (fields.intermediate_size,)),
        mlp_sizes=() if fields.mlp_sizes is None else _of_layers(fields, fields.mlp_sizes),
        layer_inputs=inputs,
        altup=AltUpConfig(
            hidden_size=fields.hidden_size,
            num_streams=fields.altup_num_inputs,
            laurel_rank=fields.laurel_rank,
            norm_eps=fields.rms_norm_eps,
        ),
        gate_deviations=_gate_deviations(fields),
    )


def _of_layers(fields: _Gemma3nConfig, values: tuple[N, ...]) -> tuple[N, ...]:
    """One value for each layer."""
    if len(values) != fields.num_hidden_layers:
        raise WeightsError(
            f"config.json: {len(values)} values of layers for {fields.num_hidden_layers} layers."
        )
    return values


def _gate_deviations(fields: _Gemma3nConfig) -> tuple[float, ...]:
    """The limits of gates by layer; by default the first ten of more layers are sparse."""
    shares = fields.activation_sparsity_pattern
    if shares is None:
        num_sparse = 10 if fields.num_hidden_layers > 10 else 0
        shares = (0.95,) * num_sparse + (0.0,) * (fields.num_hidden_layers - num_sparse)
    normal = NormalDist()
    return tuple(normal.inv_cdf(share) if share else 0.0 for share in _of_layers(fields, shares))


def _gemma3n_attention(fields: _Gemma3nConfig) -> tuple[AttentionConfig, ...]:
    windows = layer_windows(fields, sliding_except(fields, 5))
    base = _with_head_norms(fields)
    return tuple(
        replace(base, window=window, uses_local_rope=window is not None, reads_layer=owner)
        for window, owner in zip(windows, _owners(windows, fields), strict=True)
    )


def _with_head_norms(fields: _InputsConfig) -> AttentionConfig:
    """Attention whose queries, keys and values are normalized, and whose scores are not scaled."""
    eps = fields.rms_norm_eps
    norm = HeadNormConfig(eps=eps)
    return replace(attention_of(fields), head_norm=norm, value_norm_eps=eps, scale=1.0)


def _gemma4(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Gemma 3 with plain norms, larger heads in layers without a window, and inputs of layers.

    Values are normalized, too. The last layers may read the cells of earlier ones.
    """
    fields, local = parse_by_layer_type(_with_bases(_named(config)), _Gemma4Config)
    if fields.enable_moe_block:
        raise NotNativeError("config.json: enable_moe_block is not supported.")
    attention = _gemma4_attention(fields)
    local_rope, full = rope_of(local, max_length), fields.of_full_layer()
    wide = msgspec.structs.replace(fields, head_dim=full.head_dim or fields.head_dim)
    wide_mlp = 2 * fields.intermediate_size if fields.use_double_wide_mlp else 0
    sizes = tuple(
        wide_mlp or fields.intermediate_size if is_shared else fields.intermediate_size
        for is_shared in (layer.reads_layer is not None for layer in attention)
    )
    return replace(
        _gemma_of(wide, attention, max_length),
        local_rope=local_rope,
        has_post_norms=True,
        intermediate_size=max(sizes),
        mlp_sizes=sizes,
        layer_inputs=_layer_inputs(fields),
        has_layer_scales=True,
    )


def _layer_inputs(fields: _InputsConfig) -> LayerInputConfig | None:
    if not fields.hidden_size_per_layer_input:
        return None
    return LayerInputConfig(
        hidden_size=fields.hidden_size,
        size=fields.hidden_size_per_layer_input,
        num_layers=fields.num_hidden_layers,
        vocab_size=fields.vocab_size_per_layer_input,
        norm_eps=fields.rms_norm_eps,
    )


def _gemma4_attention(fields: _Gemma4Config) -> tuple[AttentionConfig, ...]:
    base, full = _with_head_norms(fields), fields.of_full_layer()
    wide = replace(
        base,
        head_dim=full.head_dim or base.head_dim,
        num_kv_heads=full.num_key_value_heads or base.num_kv_heads,
        values_are_keys=fields.attention_k_eq_v,
    )
    kinds = fields.layer_types
    if kinds is not None:  # the last layer sees all, whatever it is named
        fields = msgspec.structs.replace(fields, layer_types=(*kinds[:-1], "full_attention"))
    windows = layer_windows(fields, sliding_except(fields, 6))
    return tuple(
        replace(wide, reads_layer=owner)
        if window is None
        else replace(base, window=window, uses_local_rope=True, reads_layer=owner)
        for window, owner in zip(windows, _owners(windows, fields), strict=True)
    )


def _owners(windows: tuple[int | None, ...], fields: _InputsConfig) -> tuple[int | None, ...]:
    """The layer whose cells a layer reads: the last of its kind among those that have their own."""
    num_own = fields.num_hidden_layers - fields.num_kv_shared_layers
    last = {window: layer for layer, window in enumerate(windows[: max(num_own, 0)])}
    if not last.keys() >= set(windows):
        raise WeightsError("config.json: num_kv_shared_layers leaves layers without keys to read.")
    return tuple(None if layer < num_own else last[window] for layer, window in enumerate(windows))


def _causal(reader: Reader) -> Reader:
    """The reader for language models, whose tokens must not see later ones."""

    def read(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
        if config.get("use_bidirectional_attention") in (True, "all"):
            raise NotNativeError("config.json: use_bidirectional_attention is not supported.")
        return reader(config, max_length)

    return read


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "GemmaForCausalLM": _causal(_gemma),
        "GemmaModel": _gemma,
        "Gemma2ForCausalLM": _causal(_gemma2),
        "Gemma2Model": _gemma2,
        "Gemma3ForCausalLM": _causal(_gemma3),
        "Gemma3TextModel": _gemma3,
        "Gemma3nForCausalLM": _causal(_gemma3n),
        "Gemma3nTextModel": _gemma3n,
        "Gemma4ForCausalLM": _causal(_gemma4),
        "Gemma4TextModel": _gemma4,
    }
)
