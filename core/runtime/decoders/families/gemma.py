"""Gemma 1 and 3."""

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
            attention_of(fields),
            window=window,
            uses_local_rope=window is not None,
            head_norm=HeadNormConfig(eps=fields.rms_norm_eps, is_centred=True),
            scale=None if scalar is None else scalar**-0.5,
        )
        for window in windows
    )
    return replace(full, attention=attention, local_rope=local.rope, has_post_norms=True)


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "GemmaModel": _gemma,
        "Gemma3TextModel": _gemma3,
    }
)
