"""A `config.json` of `CsmForConditionalGeneration`, read for our decoder.

Owns the fields beyond those of every decoder. Knows no weights.
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
from triptych.core.errors import WeightsError
from triptych.core.layers.decoder import DecoderConfig

Id = Annotated[int, msgspec.Meta(ge=0)]

_MIMI_CODES = 2048  # unless its configuration says otherwise


class _Transformer(CausalLmConfig, frozen=True, kw_only=True):
    rope_theta: Positive = 500_000.0
    rms_norm_eps: Positive = 1e-5


class _DepthFields(_Transformer, frozen=True, kw_only=True):
    num_codebooks: Count
    backbone_hidden_size: Count


class CsmFields(_Transformer, frozen=True, kw_only=True):
    """What a checkpoint says of itself. `vocab_size` is that of a codebook."""

    depth_decoder_config: dict[str, Any]
    codec_config: dict[str, Any]
    num_codebooks: Count = 32
    text_vocab_size: Count = 128_256
    codebook_eos_token_id: Id = 0
    audio_token_id: Id = 128_002
    audio_eos_token_id: Id = 128_003
    bos_token_id: Id = 128_000
    tie_codebooks_embeddings: bool = True


class CsmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The two decoders, and what joins them.

    Codes from `num_drawn` on are embedded and never drawn: Mimi has none of them.
    """

    fields: CsmFields
    num_drawn: int
    backbone: DecoderConfig
    depth: DecoderConfig

    @classmethod
    def read(cls, config: Mapping[str, Any], *, max_length: int = 0) -> CsmConfig:
        """Translate `config.json`; `max_length` 0 takes the model's own context.

        Raises `WeightsError` naming the field.
        """
        fields = parse(config, CsmFields)
        depth = parse({**fields.depth_decoder_config}, _DepthFields)
        same = (fields.num_codebooks, fields.vocab_size, fields.hidden_size)
        if (depth.num_codebooks, depth.vocab_size, depth.backbone_hidden_size) != same:
            raise WeightsError("config.json: depth_decoder_config does not fit its backbone.")
        if not fields.tie_codebooks_embeddings:
            raise WeightsError("config.json: tie_codebooks_embeddings false is not supported.")
        codec_size = int(fields.codec_config.get("codebook_size", _MIMI_CODES))
        return cls(
            fields=fields,
            num_drawn=min(fields.vocab_size, codec_size),
            backbone=_decoder(fields, max_length),
            depth=_decoder(depth, depth.num_codebooks),
        )


def _decoder(fields: CausalLmConfig, max_length: int) -> DecoderConfig:
    attention = (attention_of(fields),) * fields.num_hidden_layers
    return decoder_of(fields, attention, max_length)
