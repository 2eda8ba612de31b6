"""The families that our decoder runs, and the meaning of their configurations.

Owns the table from architecture name to reader. A family is a set of defaults and one function for
the differences of its layers; the rest is shared (`hf_config`, `tensor_names`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from triptych.core.errors import WeightsError
from triptych.core.runtime.decoders.hf_config import (
    CausalLmConfig,
    Count,
    attention_of,
    decoder_of,
    layer_windows,
    parse,
)
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.moe import MoeConfig

Reader = Callable[[Mapping[str, Any], int], DecoderConfig]


def read_decoder_config(config: Mapping[str, Any], *, max_length: int = 0) -> DecoderConfig:
    """Translate a `config.json`. `max_length` is the context served; 0 means the model's own.

    Raises `WeightsError` for an unsupported architecture (naming the supported ones) and for fields
    that are missing, out of range or not supported.
    """
    reader = FAMILIES.get(architecture_of(config))
    if reader is None:
        raise WeightsError(
            f"Architecture {architecture_of(config)!r} is not supported by the native"
            f" decoder, which runs {', '.join(FAMILIES)}. Use --model-impl transformers for others."
        )
    return reader(config, max_length)


def is_native(config: Mapping[str, Any]) -> bool:
    """Whether our decoder knows this architecture."""
    return architecture_of(config) in FAMILIES


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first architecture that a `config.json` names; empty when it names none."""
    names = config.get("architectures")
    is_named = isinstance(names, list) and names and isinstance(names[0], str)
    return names[0] if is_named and names else ""


class _SmolLm3Config(CausalLmConfig, frozen=True, kw_only=True):
    rope_theta: float = 2_000_000.0
    tie_word_embeddings: bool = True
    num_key_value_heads: Count | None = 4
    max_position_embeddings: Count = 32768


class _MistralConfig(CausalLmConfig, frozen=True, kw_only=True):
    sliding_window: Count | None = 4096
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 131072


class _Qwen2Config(CausalLmConfig, frozen=True, kw_only=True):
    sliding_window: Count | None = 4096
    max_position_embeddings: Count = 32768


class _Qwen3Config(_Qwen2Config, frozen=True, kw_only=True):
    head_dim: Count | None = 128


def _llama(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    fields = parse(config, CausalLmConfig)
    return decoder_of(fields, (attention_of(fields),) * fields.num_hidden_layers, max_length)


def _smollm3(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Llama, except that every fourth layer has no positions (and may have a window)."""
    fields = parse(config, _SmolLm3Config)
    num_layers, every = fields.num_hidden_layers, fields.no_rope_layer_interval
    default = tuple(int((layer + 1) % every != 0) for layer in range(num_layers))
    uses_rope = fields.no_rope_layers or default
    windows: tuple[int | None, ...] = (None,) * num_layers
    if fields.use_sliding_window:
        windows = layer_windows(fields, tuple(not rope for rope in uses_rope))
    base = attention_of(fields)
    layers = zip(uses_rope, windows, strict=False)
    attention = tuple(replace(base, uses_rope=bool(r), window=w) for r, w in layers)
    return decoder_of(fields, attention, max_length)


def _mistral(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Llama without biases; one window for all layers unless `layer_types` says otherwise."""
    fields = parse(config, _MistralConfig)
    base = replace(attention_of(fields), has_qkv_bias=False, has_out_bias=False)
    windows = layer_windows(fields, (True,) * fields.num_hidden_layers)
    attention = tuple(replace(base, window=window) for window in windows)
    return decoder_of(fields, attention, max_length)


def _qwen2(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Biases on query, key and value; if enabled, a window from `max_window_layers` on."""
    fields = parse(config, _Qwen2Config)
    base = replace(attention_of(fields), has_qkv_bias=True, has_out_bias=False)
    attention = tuple(replace(base, window=window) for window in _qwen_windows(fields))
    return decoder_of(fields, attention, max_length)


class _MixtralConfig(_MistralConfig, frozen=True, kw_only=True):
    sliding_window: Count | None = None
    rope_theta: float = 1_000_000.0
    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2


class _Qwen3MoeConfig(_Qwen3Config, frozen=True, kw_only=True):
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
        num_chosen=fields.num_experts_per_tok,
        intermediate_size=fields.intermediate_size,
        has_mixtral_names=True,
    )
    base = replace(attention_of(fields), has_qkv_bias=False, has_out_bias=False)
    attention = (replace(base, window=fields.sliding_window),) * fields.num_hidden_layers
    return _with_experts(decoder_of(fields, attention, max_length), moe)


def _qwen3_moe(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Qwen3 with experts in most layers."""
    fields = parse(config, _Qwen3MoeConfig)
    layers, every = range(fields.num_hidden_layers), fields.decoder_sparse_step
    dense = fields.mlp_only_layers or ()
    moe = MoeConfig(
        num_experts=fields.num_local_experts or fields.num_experts,
        num_chosen=fields.num_experts_per_tok,
        intermediate_size=fields.moe_intermediate_size,
        renormalizes=fields.norm_topk_prob,
        dense_layers=frozenset(layer for layer in layers if layer in dense or (layer + 1) % every),
    )
    window = fields.sliding_window if fields.use_sliding_window else None
    base = replace(attention_of(fields), qk_norm_eps=fields.rms_norm_eps, window=window)
    attention = (base,) * fields.num_hidden_layers
    return _with_experts(decoder_of(fields, attention, max_length), moe)


def _with_experts(decoder: DecoderConfig, moe: MoeConfig) -> DecoderConfig:
    if moe.num_chosen > moe.num_experts:
        raise WeightsError(
            f"config.json: cannot choose {moe.num_chosen} of {moe.num_experts} experts for a token."
        )
    return replace(decoder, moe=moe)


class _GemmaConfig(CausalLmConfig, frozen=True, kw_only=True):
    hidden_act: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    query_pre_attn_scalar: Count | None = None


def _gemma(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Scaled embeddings, centred norms, a GeGLU."""
    fields = parse(config, _GemmaConfig)
    if fields.attn_logit_softcapping or fields.final_logit_softcapping:
        raise WeightsError("config.json: softcapping is not supported.")
    attention = (attention_of(fields),) * fields.num_hidden_layers
    return replace(
        decoder_of(fields, attention, max_length),
        embedding_scale=fields.hidden_size**0.5,
        has_centred_norms=True,
    )


def _gemma3(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Gemma with norms on heads and before residual additions, and a window in most layers.

    Layers with a window have their own rotary frequencies.
    """
    ropes = config.get("rope_parameters") or {}
    full, local = (
        _gemma({**config, "rope_parameters": ropes.get(kind)}, max_length)
        for kind in ("full_attention", "sliding_attention")
    )
    fields = parse({**config, "rope_parameters": None}, _GemmaConfig)
    windows = layer_windows(fields, (False,) * fields.num_hidden_layers)
    scalar = fields.query_pre_attn_scalar
    attention = tuple(
        replace(
            layer,
            window=window,
            uses_local_rope=window is not None,
            qk_norm_eps=fields.rms_norm_eps,
            has_centred_qk_norm=True,
            scale=None if scalar is None else scalar**-0.5,
        )
        for layer, window in zip(full.attention, windows, strict=True)
    )
    return replace(full, attention=attention, local_rope=local.rope, has_post_norms=True)


def _qwen2_vl(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Qwen2 with positions of three axes, each with a block of frequencies."""
    fields = parse(config, _Qwen2Config)
    return _with_axes(_qwen2(config, max_length), fields, (16, 24, 24))


def _qwen3_vl(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Qwen3 with positions of three axes, which alternate over the frequencies."""
    fields = parse(config, _Qwen3Config)
    decoder = _with_axes(_qwen3(config, max_length), fields, (24, 20, 20))
    return replace(decoder, rope=replace(decoder.rope, has_interleaved_sections=True))


def _with_axes(
    decoder: DecoderConfig, fields: CausalLmConfig, default: tuple[int, ...]
) -> DecoderConfig:
    rope = fields.rope_parameters or fields.rope_scaling
    sections = (rope.mrope_section if rope else ()) or default
    if len(sections) != 3 or sum(sections) != decoder.rope.num_rotated_dims // 2:
        raise WeightsError(f"config.json: mrope_section {list(sections)} does not fit a head.")
    return replace(decoder, rope=replace(decoder.rope, sections=sections))


def _qwen3(config: Mapping[str, Any], max_length: int) -> DecoderConfig:
    """Qwen2 with a norm on every query and key head instead of biases."""
    fields = parse(config, _Qwen3Config)
    base = replace(attention_of(fields), qk_norm_eps=fields.rms_norm_eps)
    attention = tuple(replace(base, window=window) for window in _qwen_windows(fields))
    return decoder_of(fields, attention, max_length)


def _qwen_windows(fields: CausalLmConfig) -> tuple[int | None, ...]:
    if not fields.use_sliding_window:
        return (None,) * fields.num_hidden_layers
    layers = range(fields.num_hidden_layers)
    return layer_windows(fields, tuple(layer >= fields.max_window_layers for layer in layers))


FAMILIES: Mapping[str, Reader] = MappingProxyType(
    {
        "LlamaForCausalLM": _llama,
        "SmolLM3ForCausalLM": _smollm3,
        "MistralForCausalLM": _mistral,
        "Qwen2ForCausalLM": _qwen2,
        "Qwen3ForCausalLM": _qwen3,
        "MixtralForCausalLM": _mixtral,
        "Qwen3MoeForCausalLM": _qwen3_moe,
        "GemmaModel": _gemma,
        "Gemma3TextModel": _gemma3,
        "Qwen2VLTextModel": _qwen2_vl,
        "Qwen2_5_VLTextModel": _qwen2_vl,
        "Qwen3VLTextModel": _qwen3_vl,
    }
)
"""The reader of each architecture. SmolLM2 and most related models declare themselves Llama."""
