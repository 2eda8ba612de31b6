"""The requests of the OpenAI speech API and its events, field by field.

Owns the allowed values of each field. A field is applied, or refused by name with the alternative;
any other name is an unknown field. The limits of a certain model are checked later, by the service.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, StringConstraints, Tag

from triptych.core import limits
from triptych.core.http.fields import (
    Name,
    NamesModel,
    NullIsAbsent,
    RefusedField,
    Refusing,
    Strict,
    Text,
)
from triptych.modalities.tts.api.results import SpeechPiece
from triptych.modalities.tts.api.service import MAX_SPEED, MIN_SPEED

MAX_INSTRUCTION_CHARS = 4096  # OpenAI's

MIN_SAMPLE_RATE, MAX_SAMPLE_RATE = 8000, 48_000

AudioFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]

_OWN_SAMPLING = "the model's recommended sampling is used; send a seed to repeat an answer."
_CLONE = "create a voice from the clip with POST /v1/audio/voices and send its id as voice."

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
        "return_timestamps": RefusedField("transcribe the answer with word timestamps.", (False,)),
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


class SpeechBody(NamesModel, NullIsAbsent, Refusing):
    """Body of `/v1/audio/speech`."""

    refused = REFUSED
    tasks = ("speech",)

    input: Text = Field(description="The text to speak.")
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
    stream_format: Literal["audio", "sse"] = Field(
        default="audio", description="The bytes of a file, or events that contain them."
    )
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


class AudioDelta(BaseModel):
    """The next bytes of the file, in base64."""

    type: Literal["speech.audio.delta"]
    audio: str


class AudioUsage(BaseModel):
    """The counts of prompt tokens and of generated speech steps."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class AudioDone(BaseModel):
    """The end of the file: `coverage` is the share of the text that was spoken.

    `token_usage` is `usage` under its name in speaches.
    """

    type: Literal["speech.audio.done"]
    usage: AudioUsage
    token_usage: AudioUsage
    finish_reason: str
    coverage: float

    @classmethod
    def of(cls, last: SpeechPiece) -> AudioDone:
        """The end of a call, from its last piece."""
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
        )
