"""The requests of the OpenAI speech API and its events, field by field.

Owns the allowed values of each field. A field is applied, or refused by name with the alternative;
any other name is an unknown field. The limits of a certain model are checked later, by the service.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Discriminator, Field, StringConstraints, Tag, model_validator

from triptych.core import limits
from triptych.core.errors import InvalidRequest
from triptych.core.http.fields import (
    Name,
    NamesModel,
    NullIsAbsent,
    RefusedField,
    Refusing,
    Strict,
    Text,
)
from triptych.core.media.captions import CaptionFormat
from triptych.modalities.tts.api.results import InputFormat, SpeechPiece, SpokenWord
from triptych.modalities.tts.api.service import MAX_SPEED, MIN_SPEED

MAX_INSTRUCTION_CHARS = 4096  # OpenAI's

MIN_SAMPLE_RATE, MAX_SAMPLE_RATE = 8000, 48_000

AudioFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]

_OWN_SAMPLING = "the model's recommended sampling is used; send a seed to repeat an answer."
_CLONE = "create a voice from the clip with POST /v1/audio/voices and send its id as voice."

_CAPTION_FIELDS = ("return_timestamps", "stream")
"""Fields of `/dev/captioned_speech` alone."""
REFUSED: Mapping[str, RefusedField] = MappingProxyType(
    {
        "emotion": RefusedField("describe it in instructions, if the model supports them."),
        "lang_code": RefusedField("send language."),
        "max_new_tokens": RefusedField(
            "the length of speech follows from its text; send less text."
        ),
        "normalization_options": RefusedField("send normalize."),
        "pitch": RefusedField("choose a voice with the pitch you want."),
        "ref_audio": RefusedField(_CLONE),
        "ref_text": RefusedField(_CLONE),
        "repetition_penalty": RefusedField(_OWN_SAMPLING),
        "return_download_link": RefusedField("store the bytes of the answer.", (False,)),
        "return_timestamps": RefusedField(
            'send timestamp_granularities ["word"] with stream_format sse, or post to'
            " /dev/captioned_speech.",
            (False,),
        ),
        "stream": RefusedField("every answer is streamed.", (True, False)),
        "temperature": RefusedField(_OWN_SAMPLING),
        "top_k": RefusedField(_OWN_SAMPLING),
        "top_p": RefusedField(_OWN_SAMPLING),
        "volume_multiplier": RefusedField("scale the samples of the answer.", (1.0,)),
    }
)
"""Fields of other servers, with the alternative to each."""


class VoiceId(Strict):
    """The id of a custom voice, in OpenAI's form."""

    id: Name


class TextNormalization(Strict):
    """Options for reading ambiguous text."""

    dialect: Literal["us", "uk"] | None = Field(
        default=None, description="Order of dates like 3/4/2024; default: the voice's."
    )
    acronyms: Literal["spell", "keep"] = Field(
        default="spell", description="Spelled letter by letter, or kept for the model."
    )
    emoji: Literal["drop", "name"] = Field(default="drop", description="Dropped, or read by name.")


def _voice_kind(value: Any) -> str:
    return ":name" if isinstance(value, str) else ":id"


class VoiceFields(NamesModel, NullIsAbsent, Refusing):
    """How a text is spoken, wherever it comes from."""

    refused = REFUSED
    tasks = ("speech",)

    voice: (
        Annotated[
            Annotated[Name, Tag(":name")] | Annotated[VoiceId, Tag(":id")],
            Discriminator(_voice_kind),
        ]
        | None
    ) = Field(default=None, description="A name or an id; default: the model's.")
    instructions: Annotated[str, StringConstraints(max_length=MAX_INSTRUCTION_CHARS)] | None = (
        Field(
            default=None,
            description="How to speak. Ignored, and reported so, by models without support.",
        )
    )
    response_format: AudioFormat = "mp3"
    sample_rate: Annotated[int, Field(ge=MIN_SAMPLE_RATE, le=MAX_SAMPLE_RATE)] | None = Field(
        default=None, description="Of the file, in Hz, if its format supports it."
    )
    speed: Annotated[float, Field(ge=MIN_SPEED, le=MAX_SPEED)] = 1.0
    seed: Annotated[int, Field(ge=-limits.MAX_SEED, le=limits.MAX_SEED)] | None = Field(
        default=None, description="The same seed gives the same sound."
    )
    language: (
        Annotated[
            str, StringConstraints(pattern=r"^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*$", max_length=35)
        ]
        | None
    ) = Field(default=None, description="Language of the text, as a tag like en-GB.")
    normalize: TextNormalization | None = Field(
        default=None, description="How ambiguous text is read."
    )


class SpeechFields(VoiceFields):
    """The fields of every request that has its text."""

    input: Text = Field(description="The text to speak.")
    input_format: InputFormat = Field(
        default="text", description="What input is: text, or SSML. Not in OpenAI's API."
    )


class SpeechBody(SpeechFields):
    """Body of `/v1/audio/speech`."""

    stream_format: Literal["audio", "sse"] = Field(
        default="audio", description="The bytes of a file, or events that contain them."
    )
    timestamp_granularities: Annotated[list[Literal["word"]], Field(max_length=1)] = Field(
        default=[], description="The times of words, in events. Not in OpenAI's API."
    )

    caption_format: CaptionFormat | None = Field(
        default=None, description="The captions of the speech, with its last event."
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        given = self.timestamp_granularities, self.caption_format
        for name, value in zip(("timestamp_granularities", "caption_format"), given, strict=True):
            if value and self.stream_format != "sse":
                raise InvalidRequest(
                    f"{name} needs stream_format sse: a file has no place for times.", param=name
                )
        return self

    @property
    def has_word_times(self) -> bool:
        """Whether the times of words are requested."""
        return bool(self.timestamp_granularities or self.caption_format)


class CaptionedSpeechBody(SpeechFields):
    """Body of `/dev/captioned_speech`, as in Kokoro-FastAPI."""

    refused = MappingProxyType(
        {name: field for name, field in REFUSED.items() if name not in _CAPTION_FIELDS}
    )
    stream: bool = Field(default=True, description="A line for each piece, or one object.")
    return_timestamps: bool = True

    @property
    def has_word_times(self) -> bool:
        """Whether the times of words are requested."""
        return self.return_timestamps


class WordTimes(BaseModel):
    """A word with its times in seconds, as in a transcription."""

    word: str
    start: float
    end: float

    @classmethod
    def of(cls, word: SpokenWord) -> WordTimes:
        """The entry of a word."""
        return cls(word=word.text, start=round(word.start_s, 3), end=round(word.end_s, 3))


class Caption(BaseModel):
    """A word with its times in seconds, by Kokoro-FastAPI's names."""

    word: str
    start_time: float
    end_time: float

    @classmethod
    def of(cls, word: SpokenWord) -> Caption:
        """The entry of a word."""
        return cls(word=word.text, start_time=round(word.start_s, 3), end_time=round(word.end_s, 3))


class CaptionedSpeech(BaseModel):
    """Bytes of a file in base64, and the words whose times became known with them."""

    audio: str
    audio_format: str
    timestamps: list[Caption] | None


class AudioDelta(BaseModel):
    """The next bytes of the file, in base64, and the words whose times became known, if wanted."""

    type: Literal["speech.audio.delta"]
    audio: str
    words: list[WordTimes] | None = None


class AudioUsage(BaseModel):
    """The counts of prompt tokens and of generated speech steps."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class AudioDone(BaseModel):
    """The end of the file: `coverage` is the share of the text that was spoken, `words` are all.

    `captions` are a file in the requested format. `token_usage` is `usage` under its name in
    speaches.
    """

    type: Literal["speech.audio.done"]
    usage: AudioUsage
    token_usage: AudioUsage
    finish_reason: str
    coverage: float
    words: list[WordTimes] | None = None
    captions: str | None = None

    @classmethod
    def of(cls, last: SpeechPiece, **wanted: Any) -> AudioDone:
        """The end of a call, from its last piece, with the `wanted` words and captions."""
        usage = AudioUsage(
            input_tokens=last.usage.num_prompt_tokens,
            output_tokens=last.usage.num_output_tokens,
            total_tokens=last.usage.num_prompt_tokens + last.usage.num_output_tokens,
        )
        return cls(
            type="speech.audio.done",
            usage=usage,
            token_usage=usage,
            finish_reason=last.finish_reason or "stop",
            coverage=round(last.coverage, 3),
            **wanted,
        )
