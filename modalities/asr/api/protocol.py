"""The requests and answers of the OpenAI transcription API, field by field.

Owns the type of each field: honored, or refused by name with the alternative; any other name is an
unknown field. Form values are text, so numbers are parsed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from triptych.core import limits
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.fields import NamesModel, RefusedField, without_refused
from triptych.modalities.asr.api.transcript import (
    ScoredToken,
    Transcript,
    TranscriptDelta,
    TranscriptSegment,
)
from triptych.modalities.asr.api.words import WordTiming
from triptych.modalities.asr.languages import LANGUAGES
from triptych.modalities.asr.traits import Task

MAX_PROMPT_CHARS = 8192
ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]

_NO_SPEAKERS = RefusedField("speakers are not distinguished; leave it out.")
_PAUSES = "windows end where the model detects a pause; leave it out."
REFUSED = {
    "keywords": RefusedField("put the words in prompt."),
    "keywords[]": RefusedField("put the words in prompt."),
    "languages": RefusedField("give one language, or none to detect it."),
    "languages[]": RefusedField("give one language, or none to detect it."),
    "known_speaker_names": _NO_SPEAKERS,
    "known_speaker_names[]": _NO_SPEAKERS,
    "known_speaker_references": _NO_SPEAKERS,
    "known_speaker_references[]": _NO_SPEAKERS,
    "chunking_strategy": RefusedField(_PAUSES, ("auto", '{"type":"server_vad"}')),
    # OpenAI's client sends settings in this form; only the documented defaults are accepted.
    "chunking_strategy[type]": RefusedField(_PAUSES, ("auto", "server_vad")),
    "chunking_strategy[threshold]": RefusedField(_PAUSES, ("0.5",)),
    "chunking_strategy[prefix_padding_ms]": RefusedField(_PAUSES, ("300",)),
    "chunking_strategy[silence_duration_ms]": RefusedField(_PAUSES, ("200",)),
}


class AsrFields(NamesModel):
    """The fields shared by transcription and translation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    task: ClassVar[Task]
    tasks = ("transcription",)

    prompt: Annotated[str, StringConstraints(max_length=MAX_PROMPT_CHARS)] = Field(
        default="", description="Preceding text, or words to expect."
    )
    response_format: ResponseFormat = "json"
    temperature: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="0 takes the likeliest token, with higher temperatures as fallback.",
    )
    seed: int | None = Field(
        default=None,
        ge=-limits.MAX_SEED,
        le=limits.MAX_SEED,
        description="The seed of sampling at temperatures above 0; default 0. Not in OpenAI's API.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        if isinstance(value, dict) and "chunking_strategy" in value:
            value = {**value, "chunking_strategy": "".join(value["chunking_strategy"].split())}
        if isinstance(value, dict) and value.get("response_format") == "diarized_json":
            raise UnsupportedOption(
                "response_format diarized_json is not offered, because speakers are not"
                " distinguished: use verbose_json.",
                param="response_format",
            )
        return without_refused(value, REFUSED)


class TranslationFields(AsrFields):
    """The fields of `/v1/audio/translations`."""

    task = "translate"
    # Values of fields that only transcriptions have:
    language: ClassVar = ""
    include: ClassVar = ()
    has_word_times: ClassVar = False
    has_segments: ClassVar = True


class TranscriptionFields(AsrFields):
    """The fields of `/v1/audio/transcriptions`."""

    task = "transcribe"
    language: Annotated[str, StringConstraints(max_length=40)] = Field(
        default="",
        description="ISO 639-1 code, locale or English name; empty or auto to detect it.",
    )
    granularities: Annotated[list[Literal["word", "segment"]], Field(max_length=2)] = Field(
        default=[],
        alias="timestamp_granularities[]",
        description="Timestamps in verbose_json; other formats ignore this.",
    )
    include: Annotated[list[Literal["logprobs"]], Field(max_length=1)] = Field(
        default=[], alias="include[]", description="Log-probabilities of tokens, in json."
    )
    stream: bool = Field(default=False, description="Server-sent events, window by window.")

    @model_validator(mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        """Accept list fields without brackets, as in forms written by hand."""
        if not isinstance(value, dict):
            return value
        fields = dict(value)
        for name in ("timestamp_granularities", "include"):
            if name not in fields:
                continue
            if f"{name}[]" in fields:
                raise InvalidRequest(f"Send either {name}[] or {name}, not both.", param=name)
            given = fields.pop(name)
            parts = given.split(",") if isinstance(given, str) else given
            fields[f"{name}[]"] = [part.strip() for part in parts]
        return fields

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.include and self.response_format != "json":
            raise InvalidRequest("include[] needs response_format json.", param="include[]")
        if self.stream and self.response_format in ("srt", "vtt"):
            raise InvalidRequest(
                f"response_format {self.response_format} cannot be streamed as events; use json"
                " or verbose_json.",
                param="stream",
            )
        return self

    @property
    def has_word_times(self) -> bool:
        """Whether word timestamps are requested and the format has them."""
        return "word" in self.granularities and self.response_format == "verbose_json"

    @property
    def has_segments(self) -> bool:
        """Whether a verbose answer lists segments: unless only words are requested."""
        return self.granularities != ["word"]


class Usage(BaseModel):
    """The audio transcribed."""

    type: Literal["duration"]
    seconds: float


class Logprob(BaseModel):
    """A token with its log-probability."""

    token: str
    bytes: list[int]
    logprob: float

    @classmethod
    def of(cls, token: ScoredToken) -> Logprob:
        """The entry of a token."""
        return cls(token=token.text, bytes=list(token.data), logprob=token.logprob)


class TimedWord(BaseModel):
    """One word with its times."""

    word: str
    start: float
    end: float

    @classmethod
    def of(cls, word: WordTiming) -> TimedWord:
        """The entry of a word."""
        return cls(word=word.text.strip(), start=round(word.start_s, 2), end=round(word.end_s, 2))


class TimedSegment(BaseModel):
    """One segment with its times and quality measures."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float

    @classmethod
    def of(cls, segment: TranscriptSegment) -> TimedSegment:
        """The entry of a segment. `seek` counts hundredths of seconds, like Whisper's frames."""
        return cls(
            id=segment.index,
            seek=round(segment.start_s * 100),
            start=round(segment.start_s, 2),
            end=round(segment.end_s, 2),
            text=segment.text,
            tokens=list(segment.token_ids),
            temperature=segment.temperature,
            avg_logprob=segment.avg_logprob,
            compression_ratio=segment.compression_ratio,
            no_speech_prob=segment.no_speech_prob,
        )


class TranscriptionReply(BaseModel):
    """The answer in json."""

    text: str
    logprobs: list[Logprob] | None = None
    usage: Usage


class VerboseReply(BaseModel):
    """The answer in verbose_json."""

    task: Task
    language: str
    duration: float
    text: str
    segments: list[TimedSegment] | None = None
    words: list[TimedWord] | None = None
    usage: Usage


class TextDelta(BaseModel):
    """The next piece of text."""

    type: Literal["transcript.text.delta"]
    delta: str
    logprobs: list[Logprob] | None = None


class TextSegment(BaseModel):
    """A finished segment; its `speaker` is always empty."""

    type: Literal["transcript.text.segment"]
    id: str
    start: float
    end: float
    text: str
    speaker: str

    @classmethod
    def of(cls, segment: TranscriptSegment) -> TextSegment:
        """The event of a segment."""
        return cls(
            type="transcript.text.segment",
            id=str(segment.index),
            start=round(segment.start_s, 2),
            end=round(segment.end_s, 2),
            text=segment.text,
            speaker="",
        )


class TextDone(BaseModel):
    """The complete text, at the end."""

    type: Literal["transcript.text.done"]
    text: str
    logprobs: list[Logprob] | None = None
    usage: Usage


Body = TranscriptionFields | TranslationFields


def json_reply(transcript: Transcript, *, has_logprobs: bool) -> TranscriptionReply:
    """The answer in json, without fields that were not requested."""
    given = _logprobs(transcript.segments, has_logprobs)
    return TranscriptionReply(text=transcript.text.strip(), usage=_usage(transcript), **given)


def text_delta(delta: TranscriptDelta, *, has_logprobs: bool) -> TextDelta:
    """The event for more text."""
    given = _logprobs(delta.segments, has_logprobs)
    return TextDelta(type="transcript.text.delta", delta=delta.text, **given)


def text_done(transcript: Transcript, *, has_logprobs: bool) -> TextDone:
    """The last event."""
    given = _logprobs(transcript.segments, has_logprobs)
    usage = _usage(transcript)
    return TextDone(type="transcript.text.done", text=transcript.text, usage=usage, **given)


def verbose_reply(
    transcript: Transcript, task: Task, *, has_segments: bool, has_words: bool
) -> VerboseReply:
    """The answer in verbose_json."""
    given: dict[str, Any] = {}
    if has_segments:
        given["segments"] = [TimedSegment.of(segment) for segment in transcript.segments]
    if has_words:
        given["words"] = [TimedWord.of(word) for word in transcript.words]
    language = "en" if task == "translate" else transcript.language
    return VerboseReply(
        task=task,
        language=LANGUAGES.get(language, language) or "unknown",
        duration=round(transcript.duration_s, 2),
        text=transcript.text.strip(),
        usage=_usage(transcript),
        **given,
    )


def _logprobs(
    segments: Sequence[TranscriptSegment], has_logprobs: bool
) -> dict[str, list[Logprob]]:
    if not has_logprobs:
        return {}
    return {"logprobs": [Logprob.of(token) for part in segments for token in part.tokens]}


def _usage(transcript: Transcript) -> Usage:
    return Usage(type="duration", seconds=round(transcript.duration_s, 2))
