"""A `config.json` of `HiggsAudioV2ForConditionalGeneration`, read for our decoder.

Owns the fields beyond those of every Llama. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from triptych.core.decoders.hf_config import (
    CausalLmConfig,
    Count,
    Positive,
    attention_of,
    decoder_of,
    parse,
)
from triptych.core.layers.decoder import DecoderConfig

Id = Annotated[int, msgspec.Meta(ge=0)]


class HiggsFields(CausalLmConfig, frozen=True, kw_only=True):
    """What a checkpoint says of itself. `codebook_size` counts the two marks of a stream.

    Sound stands in a prompt between two words, and `eos_token_id` ends a turn.
    """

    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 500_000.0
    num_codebooks: Count = 8
    codebook_size: Count = 1026
    eos_token_id: Id = 128_009
    audio_bos_token_id: Id = 128_013
    audio_eos_token_id: Id = 128_012
    audio_stream_bos_id: Id = 1024
    audio_stream_eos_id: Id = 1025


class HiggsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The decoder, and what is special about it."""

    fields: HiggsFields
    decoder: DecoderConfig

    @classmethod
    def read(cls, config: Mapping[str, Any], *, max_length: int = 0) -> HiggsConfig:
        """Translate `config.json`. Raises `WeightsError` naming the field."""
        fields = parse(config, HiggsFields)
        attention = (attention_of(fields),) * fields.num_hidden_layers
        return cls(fields=fields, decoder=decoder_of(fields, attention, max_length))
