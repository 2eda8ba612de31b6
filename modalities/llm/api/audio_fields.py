"""Sound in the OpenAI chat API: recordings in messages, and the voice of an answer.

Owns the values that each field may have. Knows no route.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.fields import Name, Strict, Text, inert

AudioFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"]
HeardFormat = Literal["wav", "mp3", "flac", "opus", "ogg", "aac", "m4a", "webm"]
MAX_SPOKEN_TOKENS = 200
"""Most tokens of a spoken answer whose caller sets no limit: about a minute of speech.

It does not hold where tokens may be those of reasoning or of calls, which are not spoken.
"""
SPOKEN_INSTRUCTIONS = "Answer in one or two short sentences, as in a conversation."
"""Instructions of a spoken conversation whose caller gives none."""


class RecordedSound(Strict):
    """A recording in base64."""

    data: Text = Field(description="The file, in base64.")
    format: HeardFormat


class AudioPart(Strict):
    """A recording in a user's message. It is transcribed by the served recognizer."""

    type: Literal["input_audio"]
    input_audio: RecordedSound


class SpokenReference(Strict):
    """The sound of an earlier answer, which the conversation continues.

    The whole object of a reply is taken as well: with its transcript nothing is looked up.
    """

    id: Name
    transcript: Text | None = None
    data: Text | None = inert("data")
    expires_at: Annotated[int, Field(ge=0, le=2**53)] | None = inert("expires_at")


class NamedVoice(Strict):
    """The id of a custom voice, in OpenAI's form."""

    id: Name


def _voice_kind(value: Any) -> str:
    return ":name" if isinstance(value, str) else ":id"


class AudioOutput(Strict):
    """How an answer is spoken."""

    voice: (
        Annotated[
            Annotated[Name, Tag(":name")] | Annotated[NamedVoice, Tag(":id")],
            Discriminator(_voice_kind),
        ]
        | None
    ) = Field(default=None, description="A name or an id; default: the speech model's.")
    format: AudioFormat | None = Field(
        default=None, description="Default: wav, and pcm16 (24 kHz) in a stream."
    )
    model: Name | None = Field(
        default=None, description="The speech model; default: the first that is served."
    )

    @property
    def voice_name(self) -> str:
        """The name or the id of the voice; empty for the default."""
        return self.voice.id if isinstance(self.voice, NamedVoice) else self.voice or ""


def _check_modalities(names: list[str]) -> list[str]:
    if "text" not in names or len(set(names)) < len(names):
        raise UnsupportedOption(
            'modalities are ["text"] or ["text", "audio"]: an answer is always written.',
            param="modalities",
        )
    return names


class AudioFields(Strict):
    """The fields of a request that say whether its answer is spoken."""

    modalities: (
        Annotated[
            list[Literal["text", "audio"]],
            Field(min_length=1, max_length=2),
            AfterValidator(_check_modalities),
        ]
        | None
    ) = Field(default=None, description="With `audio` the answer is spoken, too.")
    audio: AudioOutput | None = Field(default=None, description="Voice and format of the sound.")

    @property
    def is_spoken(self) -> bool:
        """Whether the answer is spoken."""
        return "audio" in (self.modalities or ())

    @model_validator(mode="after")
    def _check_audio(self) -> Self:
        if self.audio is not None and not self.is_spoken:
            raise InvalidRequest('audio needs modalities ["text", "audio"].', param="audio")
        return self
