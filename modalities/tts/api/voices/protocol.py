"""The forms and cards of `/v1/audio/voices`, in OpenAI's shapes where it has them.

Owns the allowed values of each field. Knows neither where voices are kept nor the content of a
recording.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, StringConstraints, model_validator

from triptych.core.errors import UnsupportedOption
from triptych.core.http.fields import Name, Strict
from triptych.core.limits import MAX_NAME_CHARS
from triptych.modalities.tts.api.frontend.base import Voice
from triptych.modalities.tts.api.voices.record import MAX_TRANSCRIPT_CHARS, VoiceRecord, check_name

_Statement = Annotated[str, StringConstraints(max_length=MAX_TRANSCRIPT_CHARS)]
_Language = Annotated[
    str, StringConstraints(pattern=r"^([A-Za-z]{2,3}(-[A-Za-z0-9]{2,8}){0,4})?$", max_length=40)
]


class VoiceForm(Strict):
    """A voice to create from the recording `audio_sample` of the same form.

    `consent` states that and how the speaker agreed, or is the id of a record of it. `transcript`
    holds the words of the recording; some models imitate better with them. `model` must be able to
    imitate; default: the first such model.
    """

    name: Annotated[
        str, AfterValidator(check_name), Field(json_schema_extra={"maxLength": MAX_NAME_CHARS})
    ]
    consent: Annotated[_Statement, StringConstraints(min_length=1)]
    transcript: _Statement = ""
    model: Name | None = None
    language: _Language = ""
    type: Literal["audio_sample"] = "audio_sample"

    @model_validator(mode="before")
    @classmethod
    def _from_a_recording(cls, value: Any) -> Any:
        if isinstance(value, dict) and (value.get("type") == "prompt" or "prompt" in value):
            msg = "Voices are created from recordings: send an audio_sample, not a prompt."
            raise UnsupportedOption(msg, param="prompt")
        return value


class VoiceCard(BaseModel):
    """A voice, requested by `id`. A built-in one has `created_at` 0."""

    id: str
    object: Literal["audio.voice"] = "audio.voice"
    created_at: int
    name: str
    type: Literal["audio_sample", "built_in"]
    model: str
    language: str
    description: str = ""
    duration_s: float | None = None

    @classmethod
    def of_model(cls, voice: Voice, model: str) -> Self:
        """The card of a built-in voice of `model`."""
        return cls(
            id=voice.name,
            created_at=0,
            name=voice.name,
            type="built_in",
            model=model,
            language=voice.language,
            description=voice.description,
        )

    @classmethod
    def of_caller(cls, record: VoiceRecord) -> Self:
        """The card of a custom voice."""
        return cls(
            id=record.id,
            created_at=record.created_s,
            name=record.about.name,
            type="audio_sample",
            model=record.about.model,
            language=record.about.language,
            duration_s=round(record.duration_s, 3),
        )


class VoiceList(BaseModel):
    """Voices: the built-in ones, then the caller's own. Open WebUI reads `voices`."""

    object: Literal["list"] = "list"
    data: list[VoiceCard]
    voices: list[VoiceCard]


class VoiceDeleted(BaseModel):
    """Confirms that a voice was deleted."""

    id: str
    object: Literal["audio.voice.deleted"] = "audio.voice.deleted"
    deleted: bool = True
