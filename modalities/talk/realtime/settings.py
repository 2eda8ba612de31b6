"""The settings of a session, as `session.update` writes them.

Owns the values of each field: honoured, or refused by name with the alternative. An update is
merged into the settings field by field; null clears a field. Knows no event and no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar, cast

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.errors import UNION_TAG
from triptych.core.http.fields import (
    JsonObject,
    Label,
    Name,
    NullIsAbsent,
    RefusedField,
    Refusing,
    Strict,
    Text,
    type_of,
    unknown_type,
)
from triptych.core.http.validation import invalid_body
from triptych.core.limits import SAMPLING_RANGES
from triptych.modalities.talk.hearing.sound_input import SoundFormat
from triptych.modalities.talk.hearing.turns import MAX_MS
from triptych.modalities.talk.ports import TurnOptions

MIN_SPEED, MAX_SPEED = 0.25, 1.5
"""OpenAI's range of the speed of speech in a session."""
MAX_TOOLS = 128
_FORMATS: Mapping[str, SoundFormat] = MappingProxyType(
    {"audio/pcm": "pcm16", "audio/pcmu": "g711_ulaw", "audio/pcma": "g711_alaw"}
)
_SILENCE_MS = MappingProxyType({"low": 1200, "medium": 700, "auto": 700, "high": 400})
"""What semantic_vad is mapped to: the silence that ends a turn, by eagerness."""
Modalities = Annotated[list[Literal["text", "audio"]], Field(min_length=1, max_length=1)]
NumTokens = Annotated[
    Annotated[int, Field(ge=1, le=SAMPLING_RANGES["max_tokens"][1]), Tag(f"{UNION_TAG}number")]
    | Annotated[Literal["inf"], Tag(f"{UNION_TAG}word")],
    Discriminator(lambda value: UNION_TAG + ("word" if isinstance(value, str) else "number")),
]


class SoundType(NullIsAbsent):
    """A format of sound: PCM of 16 bits at 24 kHz, or G.711 mu-law or A-law at 8 kHz."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: int = 24_000

    @model_validator(mode="before")
    @classmethod
    def _fill_rate(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = 8_000 if type_of(value) in ("audio/pcmu", "audio/pcma") else 24_000
        if value.get("rate") not in (None, known):
            raise UnsupportedOption(f"The rate of this format is {known}.", param="rate")
        return {**value, "rate": known}

    @property
    def form(self) -> SoundFormat:
        """The format's name in `hearing`."""
        return _FORMATS[self.type]


class TurnDetection(NullIsAbsent):
    """When a turn of the user begins and ends. There is no model that judges its meaning.

    `semantic_vad` is voice activity with a silence that `eagerness` sets.
    """

    type: Literal["server_vad", "semantic_vad"] = "server_vad"
    threshold: float = Field(default=0.5, gt=0, lt=1)
    prefix_padding_ms: int = Field(default=300, ge=0, le=5_000)
    silence_duration_ms: int = Field(default=500, ge=100, le=10_000)
    idle_timeout_ms: Annotated[int, Field(ge=1_000, le=MAX_MS)] | None = None
    create_response: bool = True
    interrupt_response: bool = True
    hold_response: bool = False
    """Ours: the client holds the answer's sound while speech is suspected."""
    eagerness: Literal["low", "medium", "high", "auto"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_type(cls, value: Any) -> Any:
        return {"type": "server_vad", **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.type == "server_vad" and self.eagerness is not None:
            raise InvalidRequest("eagerness belongs to semantic_vad.", param="eagerness")
        if self.type == "semantic_vad" and "silence_duration_ms" in self.model_fields_set:
            raise InvalidRequest(
                "silence_duration_ms belongs to server_vad: set eagerness.",
                param="silence_duration_ms",
            )
        if self.hold_response and not self.interrupt_response:
            raise InvalidRequest(
                "hold_response needs interrupt_response: what is held would never be interrupted.",
                param="hold_response",
            )
        return self

    @property
    def options(self) -> TurnOptions:
        """The options of the detector."""
        silence_ms = self.silence_duration_ms
        if self.type == "semantic_vad":
            silence_ms = _SILENCE_MS[self.eagerness or "auto"]
        return TurnOptions(
            threshold=self.threshold,
            prefix_padding_ms=self.prefix_padding_ms,
            silence_duration_ms=silence_ms,
            idle_timeout_ms=self.idle_timeout_ms,
            reports_suspicion=self.hold_response,
        )


class Transcription(Refusing):
    """The transcription of the user's speech. The model of a conversation reads this text."""

    refused: ClassVar[Mapping[str, RefusedField]] = MappingProxyType(
        {
            "delay": RefusedField("text is sent as soon as it is settled; leave it out."),
            "keywords": RefusedField("write the words into prompt."),
            "languages": RefusedField("set language, or nothing to have it recognized."),
        }
    )
    model: Name | None = None
    language: Label | None = None
    prompt: Text | None = None


class SoundIn(NullIsAbsent, Refusing):
    """The sound that is heard."""

    refused: ClassVar[Mapping[str, RefusedField]] = MappingProxyType(
        {"noise_reduction": RefusedField("send sound that the client has cleaned.")}
    )
    nullable = ("turn_detection",)
    format: SoundType = SoundType()
    transcription: Transcription | None = None
    turn_detection: TurnDetection | None = TurnDetection()

    @property
    def interrupts(self) -> bool:
        """Whether speech ends an answer."""
        return self.turn_detection is not None and self.turn_detection.interrupt_response


class VoiceReference(Strict):
    """A voice that the caller has made."""

    id: Name


class SoundOut(NullIsAbsent):
    """The sound that is said."""

    format: SoundType = SoundType()
    voice: Name | VoiceReference | None = None
    speed: float = Field(default=1.0, ge=MIN_SPEED, le=MAX_SPEED)

    @property
    def voice_name(self) -> str:
        """The name or id of the voice; empty for the model's default."""
        return self.voice.id if isinstance(self.voice, VoiceReference) else self.voice or ""


class SoundBoth(NullIsAbsent):
    """Sound in both directions."""

    input: SoundIn = SoundIn()
    output: SoundOut = SoundOut()


class SoundOnlyIn(NullIsAbsent):
    """The sound of a transcription session."""

    input: SoundIn = SoundIn()


class SessionTool(Strict):
    """A function of the client that the model may call."""

    type: Literal["function"] = "function"
    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, value: Any) -> Any:
        if kind := unknown_type(value, "function"):
            raise UnsupportedOption(
                f"Tools are functions of the client, not {kind}.", param="tools"
            )
        return value


class NamedFunction(Strict):
    """The one function to call."""

    type: Literal["function"]
    name: Name


ToolChoice = Literal["none", "auto", "required"] | NamedFunction
Tools = Annotated[list[SessionTool], Field(max_length=MAX_TOOLS)]
_NO_REASONING = "reasoning is not spoken; it is left out of answers."
_REFUSED: Mapping[str, RefusedField] = MappingProxyType(
    {
        "include": RefusedField("no log-probabilities of transcriptions are sent.", ([],)),
        "parallel_tool_calls": RefusedField("calls come one after another.", (True, False)),
        "prompt": RefusedField("write it into instructions."),
        "reasoning": RefusedField(_NO_REASONING, ({},)),
        "tracing": RefusedField("start the server with --otlp-traces-endpoint.", ()),
    }
)
"""Fields of a session; `id`, `object` and `expires_at` are the server's, and echoed by clients."""
_ECHOED = ("id", "object", "expires_at", "client_secret")


class _Session(NullIsAbsent, Refusing):
    refused = _REFUSED

    @model_validator(mode="before")
    @classmethod
    def _drop_echoes(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: field for name, field in value.items() if name not in _ECHOED}


class Conversation(_Session):
    """The settings of a conversation."""

    type: Literal["realtime"] = "realtime"
    model: Name | None = None
    output_modalities: Modalities = Field(default=["audio"])
    instructions: Text = ""
    audio: SoundBoth = SoundBoth()
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    max_output_tokens: NumTokens = "inf"
    truncation: Literal["auto", "disabled"] = "auto"

    @property
    def speaks(self) -> bool:
        """Whether answers are spoken."""
        return self.output_modalities == ["audio"]

    def with_defaults(self, **values: Any) -> Self:
        """Return a copy with values of the fields that are not set, which later updates replace."""
        own = {name: value for name, value in values.items() if name not in self.model_fields_set}
        return self.model_construct(self.model_fields_set, **{**self.__dict__, **own})


class Dictation(_Session):
    """The settings of a transcription session."""

    type: Literal["transcription"] = "transcription"
    audio: SoundOnlyIn = SoundOnlyIn()


Settings = Conversation | Dictation
SettingsT = TypeVar("SettingsT", bound=Settings)
_KINDS: Mapping[str, type[Settings]] = MappingProxyType(
    {"realtime": Conversation, "transcription": Dictation}
)
_OLD_NAMES = MappingProxyType({"max_response_output_tokens": "max_output_tokens"})
"""Names of the API's beta."""


class CheckSettings(Protocol):
    """Returns settings with the models' own names. Raises `RequestError`s for unknown names."""

    def __call__(self, settings: SettingsT) -> SettingsT:
        """Check the settings."""
        ...


def accept(settings: SettingsT) -> SettingsT:
    """Return settings as they are, without a check."""
    return settings


def updated(settings: Settings, update: Mapping[str, Any]) -> Settings:
    """Return `settings` with the fields of a `session.update`.

    Raises `InvalidRequest` for another type than that of the session, `RequestValidationError` for
    fields that cannot be read.
    """
    kind = type_of(update) or settings.type
    if kind not in _KINDS:
        raise InvalidRequest("The type of a session is realtime or transcription.", param="type")
    if kind != settings.type:
        raise InvalidRequest(
            f"This is a {settings.type} session; open another one for {kind}.", param="type"
        )
    update = _renamed(update)
    merged = _merged(settings.model_dump(exclude_unset=True), update)
    if isinstance(settings, Conversation):
        _validated(Conversation, update)
        return _validated(Conversation, merged)
    _validated(Dictation, update)
    return _validated(Dictation, merged)


def with_overrides(settings: Conversation, given: Mapping[str, Any]) -> Conversation:
    """Return `settings` with the fields of one `response.create`. Raises as `updated` does."""
    merged = _merged(settings.model_dump(exclude_unset=True), _renamed(given))
    return _validated(Conversation, merged)


def shown(settings: Settings) -> dict[str, Any]:
    """Return the settings as events show them."""
    return settings.model_dump(exclude={"audio": {"input": {"turn_detection": _hidden(settings)}}})


def _hidden(settings: Settings) -> set[str]:
    turns = settings.audio.input.turn_detection
    hidden = {"hold_response"} if turns is None or not turns.hold_response else set()
    if turns is None or turns.type == "server_vad":
        return {"eagerness", *hidden}
    return {"threshold", "prefix_padding_ms", "silence_duration_ms", "idle_timeout_ms", *hidden}


def _validated(kind: type[SettingsT], given: Mapping[str, Any]) -> SettingsT:
    try:
        return cast("SettingsT", kind.model_validate(given))
    except ValidationError as error:
        raise invalid_body(kind, error) from error


def _renamed(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields by their present names."""
    return {_OLD_NAMES.get(name, name): value for name, value in given.items()}


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Merge objects; an object of another `type` replaces the old one."""
    merged = dict(old)
    for name, value in new.items():
        before = merged.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping) and _is_same(before, value):
            merged[name] = _merged(before, value)
        else:
            merged[name] = value
    return merged


def _is_same(before: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    return "type" not in value or before.get("type", value["type"]) == value["type"]


def chat_tools(tools: Sequence[SessionTool]) -> list[dict[str, Any]]:
    """Return tools as chat takes them."""
    return [
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
        for tool in tools
    ]


def chat_tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    """Return a choice of tools as chat takes it."""
    if isinstance(choice, NamedFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return choice
