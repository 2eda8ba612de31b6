"""Qwen3-TTS's configuration and how its prompts are spelled as ids, without torch.

Owns the fields that front end and engine both read, and the ids of prompts: each position of a
prompt is the sum of a text token and at most one token of the codec's vocabulary, so its id is
`text + text_vocab_size * (1 + codec token)`, or the text token alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from triptych.core.errors import WeightsError
from triptych.core.process.typed import convert, describe_mismatch

MODEL_TYPE = "qwen3_tts"
CODEC_FOLDER = "speech_tokenizer"
"""The folder of the codec within the model's."""
_Value = TypeVar("_Value")
NUM_SPECIAL = 1024
"""The last entries of the first codebook's table are no sound; of them only the end is sampled."""


NUMBER_BITS = 44
"""Bits of a recorded speaker's number: with them, ids of prompts stay below those of frames."""


class TalkerIds(msgspec.Struct, frozen=True, kw_only=True):
    """The ids in `talker_config`: the codec's vocabulary, and names for parts of it."""

    vocab_size: int
    text_vocab_size: Annotated[int, msgspec.Meta(ge=1, lt=2**18)] = 151_936
    num_code_groups: int = 16
    codec_eos_token_id: int
    codec_think_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    codec_pad_id: int
    codec_bos_id: int
    spk_id: dict[str, int] | None = None
    spk_is_dialect: dict[str, str | bool] | None = None
    codec_language_id: dict[str, int] | None = None


class QwenTtsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json outside of the decoders. Kinds as published."""

    talker_config: TalkerIds
    tts_model_type: Literal["custom_voice", "voice_design", "base"] = "custom_voice"
    tokenizer_type: str = ""
    tts_model_size: str = ""
    tts_pad_token_id: int = 151_671
    tts_bos_token_id: int = 151_672
    tts_eos_token_id: int = 151_673

    @property
    def speakers(self) -> Mapping[str, int]:
        """The ids of the built-in voices, by their names in lower case."""
        return _lower(self.talker_config.spk_id)

    @property
    def languages(self) -> Mapping[str, int]:
        """The ids of the languages, without the dialects of voices."""
        languages = self.talker_config.codec_language_id or {}
        return {name: each for name, each in languages.items() if "dialect" not in name}

    def opening(self, language: str, speaker: str) -> Iterator[int]:
        """The ids of the language ("" leaves it to the model) and of a built-in voice, if any."""
        ids = self.talker_config
        known = ids.codec_language_id or {}
        language_id = known.get(language)
        dialect = _lower(ids.spk_is_dialect).get(speaker)
        if language in ("", "chinese") and isinstance(dialect, str):
            language_id = known.get(dialect, language_id)
        codes = (
            (ids.codec_nothink_id, ids.codec_think_bos_id, ids.codec_think_eos_id)
            if language_id is None
            else (ids.codec_think_id, ids.codec_think_bos_id, language_id, ids.codec_think_eos_id)
        )
        speakers = (self.speakers[speaker],) if speaker else ()
        for code in (*codes, *speakers):
            yield self.pair(self.tts_pad_token_id, code)
        yield self.pair(self.tts_bos_token_id, ids.codec_pad_id)

    def clip(self, text_ids: Sequence[int]) -> Iterator[int]:
        """The ids before a text that is spoken in the voice of a recording with these words.

        The speaker is a token past the codec's vocabulary.
        """
        *opening, last = self.opening("", "")
        yield from (*opening, self.pair(self.tts_pad_token_id, self.recorded), last)
        for text_id in text_ids:
            yield self.pair(text_id, self.talker_config.codec_pad_id)

    @property
    def recorded(self) -> int:
        """The first of the codec's tokens that stand for recorded speakers."""
        return self.talker_config.vocab_size

    def spoken(self, text_ids: Sequence[int]) -> Iterator[int]:
        """The ids of a text that is spoken, and of its end."""
        for text_id in (*text_ids, self.tts_eos_token_id):
            yield self.pair(text_id, self.talker_config.codec_pad_id)

    @property
    def begin(self) -> int:
        """The id after which the first frame is sampled."""
        return self.pair(self.tts_pad_token_id, self.talker_config.codec_bos_id)

    def pair(self, text_id: int, code: int) -> int:
        """The id of a position with a text token and a token of the codec."""
        return text_id + self.talker_config.text_vocab_size * (1 + code)


def _lower(table: Mapping[str, _Value] | None) -> Mapping[str, _Value]:
    return {name.lower(): value for name, value in (table or {}).items()}


def read_qwen_config(config: Mapping[str, Any]) -> QwenTtsConfig:
    """Check config.json. Raises `WeightsError` that names the field or what is not supported."""
    try:
        fields = convert(dict(config), QwenTtsConfig)
    except msgspec.ValidationError as error:
        reason = describe_mismatch(error, config)
        raise WeightsError(f"config.json does not describe a Qwen3-TTS: {reason}.") from None
    if fields.tokenizer_type not in ("", "qwen3_tts_tokenizer_12hz"):
        raise WeightsError(
            f"This Qwen3-TTS has the tokenizer {fields.tokenizer_type}; only those with"
            " qwen3_tts_tokenizer_12hz are supported."
        )
    if fields.tts_model_type == "custom_voice" and not fields.speakers:
        raise WeightsError("config.json: a Qwen3-TTS of the kind custom_voice must list spk_id.")
    return fields
