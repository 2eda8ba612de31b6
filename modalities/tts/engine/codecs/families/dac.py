"""DAC decoders: DAC itself, and the XCodec and Higgs Audio tokenizers, which use the same."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from triptych.modalities.tts.engine.codecs.builder import Rules, build
from triptych.modalities.tts.engine.codecs.decoder import Adapter
from triptych.modalities.tts.engine.codecs.stages import residual

RULES: Rules = MappingProxyType(
    {
        "DacDecoder": lambda walk: walk.chain("conv1", "block", "snake1", "conv2", "tanh"),
        "DacDecoderBlock": lambda walk: walk.chain(
            "snake1", "conv_t1", "res_unit1", "res_unit2", "res_unit3"
        ),
        "DacResidualUnit": lambda walk: residual(walk.chain("snake1", "conv1", "snake2", "conv2")),
    }
)


def dac(model: Any) -> Adapter:
    """The adapter of `DacModel`: codes [B, Q, F] of at most the model's codebooks."""
    return Adapter(
        stage=build(model.decoder, RULES, path="decoder"),
        embed=lambda codes: model.quantizer.from_codes(codes)[0],
        one_shot=lambda codes: model.decode(audio_codes=codes).audio_values,
        sample_rate=model.config.sampling_rate,
        num_codebooks=model.config.n_codebooks,
        codebook_size=model.config.codebook_size,
        weight=model.decoder.conv1.weight,
    )


def xcodec(model: Any) -> Adapter:
    """The adapter of `XcodecModel` and `HiggsAudioV2TokenizerModel`: codes [B, Q, F]."""
    return Adapter(
        stage=build(model.acoustic_decoder, RULES, path="acoustic_decoder"),
        embed=lambda codes: model.fc2(
            model.quantizer.decode(codes.transpose(0, 1)).transpose(1, 2)
        ).transpose(1, 2),
        one_shot=lambda codes: model.decode(codes).audio_values[:, 0],
        sample_rate=model.config.sample_rate,
        num_codebooks=model.config.num_quantizers,
        codebook_size=model.config.codebook_size,
        weight=model.fc2.weight,
    )
