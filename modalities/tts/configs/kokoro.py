"""Kokoro's configuration and phoneme alphabet, as the hub's config.json states them.

Owns reading and checking that file, and the released model's own numbers for weights that come
without it. Knows no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from triptych.core.errors import ContextLengthExceeded, InvalidRequest, WeightsError
from triptych.core.process.typed import convert, describe_mismatch

SAMPLE_RATE = 24_000
NUM_HARMONICS = 8
"""Overtones of the source above its fundamental."""
BOUNDARY_ID = 0
"""The token before and after every sentence."""


class AlbertConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The phoneme-level language model. All its layers share one set of weights."""

    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    num_hidden_layers: int
    max_position_embeddings: int = 512
    embedding_size: int = 128
    type_vocab_size: int = 2


class GeneratorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The upsampling half of the decoder, ending in an inverse short-time Fourier transform."""

    upsample_rates: tuple[int, ...]
    upsample_kernel_sizes: tuple[int, ...]
    upsample_initial_channel: int
    resblock_kernel_sizes: tuple[int, ...]
    resblock_dilation_sizes: tuple[tuple[int, ...], ...]
    n_fft: int = msgspec.field(name="gen_istft_n_fft")
    hop: int = msgspec.field(name="gen_istft_hop_size")

    @property
    def samples_per_pitch(self) -> int:
        """Samples per value of the pitch curve."""
        return math.prod(self.upsample_rates) * self.hop

    @property
    def samples_per_frame(self) -> int:
        """Samples per decoder frame, which holds two pitch values."""
        return 2 * self.samples_per_pitch


class KokoroConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A whole model. The last two fields are constants of the architecture, absent from files."""

    num_tokens: int = msgspec.field(name="n_token")
    hidden_size: int = msgspec.field(name="hidden_dim")
    style_size: int = msgspec.field(name="style_dim")
    num_layers: int = msgspec.field(name="n_layer")
    max_duration: int = msgspec.field(name="max_dur")
    kernel_size: int = msgspec.field(name="text_encoder_kernel_size")
    albert: AlbertConfig = msgspec.field(name="plbert")
    generator: GeneratorConfig = msgspec.field(name="istftnet")
    vocab: dict[str, int]
    decoder_channels: int = 1024
    residual_channels: int = 64

    @property
    def max_phonemes(self) -> int:
        """Maximum phonemes of a sentence, without the two boundary tokens."""
        return self.albert.max_position_embeddings - 2

    def encode(self, phonemes: str) -> tuple[int, ...]:
        """Token ids of IPA `phonemes`; unknown symbols are dropped, as upstream."""
        return tuple(self.vocab[symbol] for symbol in phonemes if symbol in self.vocab)

    def check_ids(self, phoneme_ids: tuple[int, ...]) -> None:
        """Raise `InvalidRequest` for invalid ids, `ContextLengthExceeded` for too many."""
        if not phoneme_ids:
            raise InvalidRequest("There is nothing to say: the text has no phonemes.")
        if len(phoneme_ids) > self.max_phonemes:
            raise ContextLengthExceeded(
                f"A sentence of {len(phoneme_ids)} phonemes is too long; split it into parts of"
                f" at most {self.max_phonemes}."
            )
        if not all(0 < token < self.num_tokens for token in phoneme_ids):
            raise InvalidRequest(f"Phoneme ids must lie between 1 and {self.num_tokens - 1}.")


def read_kokoro_config(values: Mapping[str, Any]) -> KokoroConfig:
    """Read the values of a config.json. Raises `WeightsError` that names the error."""
    try:
        config = convert(dict(values), KokoroConfig)
    except msgspec.ValidationError as error:
        reason = describe_mismatch(error, values)
        raise WeightsError(f"config.json is not a Kokoro config: {reason}.") from error
    generator = config.generator
    if len(generator.upsample_rates) != len(generator.upsample_kernel_sizes):
        raise WeightsError("config.json must give one upsampling kernel size per rate.")
    if len(generator.resblock_kernel_sizes) != len(generator.resblock_dilation_sizes):
        raise WeightsError("config.json must give one list of dilations per kernel size.")
    return config


# ruff: noqa: RUF001  # phonetic letters look like others
# fmt: off
VOCABULARY: Mapping[str, int] = {
    ";": 1, ":": 2, ",": 3, ".": 4, "!": 5, "?": 6, "—": 9, "…": 10, '"': 11, "(": 12, ")": 13,
    "“": 14, "”": 15, " ": 16, "\u0303": 17, "ʣ": 18, "ʥ": 19, "ʦ": 20, "ʨ": 21, "ᵝ": 22,
    "\uab67": 23, "A": 24, "I": 25, "O": 31, "Q": 33, "S": 35, "T": 36, "W": 39, "Y": 41, "ᵊ": 42,
    "a": 43, "b": 44, "c": 45, "d": 46, "e": 47, "f": 48, "h": 50, "i": 51, "j": 52, "k": 53,
    "l": 54, "m": 55, "n": 56, "o": 57, "p": 58, "q": 59, "r": 60, "s": 61, "t": 62, "u": 63,
    "v": 64, "w": 65, "x": 66, "y": 67, "z": 68, "ɑ": 69, "ɐ": 70, "ɒ": 71, "æ": 72, "β": 75,
    "ɔ": 76, "ɕ": 77, "ç": 78, "ɖ": 80, "ð": 81, "ʤ": 82, "ə": 83, "ɚ": 85, "ɛ": 86, "ɜ": 87,
    "ɟ": 90, "ɡ": 92, "ɥ": 99, "ɨ": 101, "ɪ": 102, "ʝ": 103, "ɯ": 110, "ɰ": 111, "ŋ": 112,
    "ɳ": 113, "ɲ": 114, "ɴ": 115, "ø": 116, "ɸ": 118, "θ": 119, "œ": 120, "ɹ": 123, "ɾ": 125,
    "ɻ": 126, "ʁ": 128, "ɽ": 129, "ʂ": 130, "ʃ": 131, "ʈ": 132, "ʧ": 133, "ʊ": 135, "ʋ": 136,
    "ʌ": 138, "ɣ": 139, "ɤ": 140, "χ": 142, "ʎ": 143, "ʒ": 147, "ʔ": 148, "ˈ": 156, "ˌ": 157,
    "ː": 158, "ʰ": 162, "ʲ": 164, "↓": 169, "→": 171, "↗": 172, "↘": 173, "ᵻ": 177,
}
# fmt: on

VOICE_PREFIX = "voices."
"""Prefix of the names of voice tensors."""

MODEL_TYPE = "kokoro"
"""Marks the folders that Triptych writes; the hub's config.json has no model type."""

KOKORO_82M: Mapping[str, Any] = {
    "n_token": 178,
    "hidden_dim": 512,
    "style_dim": 128,
    "n_layer": 3,
    "max_dur": 50,
    "text_encoder_kernel_size": 5,
    "plbert": {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 2048,
        "max_position_embeddings": 512,
        "num_hidden_layers": 12,
    },
    "istftnet": {
        "upsample_rates": [10, 6],
        "upsample_kernel_sizes": [20, 12],
        "upsample_initial_channel": 512,
        "resblock_kernel_sizes": [3, 7, 11],
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
        "gen_istft_n_fft": 20,
        "gen_istft_hop_size": 5,
    },
    "vocab": VOCABULARY,
}
"""The released model's config.json, for weights without one."""
