"""The events of a client, field by field, and the error event that answers a bad one.

Owns the values of each field: honoured, or refused by name. Knows no state.
"""

from __future__ import annotations

import binascii
from typing import Annotated, Any, Literal, get_args

from fastapi.exceptions import RequestValidationError
from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError, model_validator

from triptych.core.errors import InvalidRequest, TriptychError, UnsupportedOption
from triptych.core.http.body import parse_json
from triptych.core.http.errors import OPENAI, to_public
from triptych.core.http.fields import (
    JsonObject,
    Label,
    Metadata,
    Name,
    RefusedField,
    Refusing,
    Strict,
    Text,
    type_of,
)
from triptych.core.http.validation import invalid_body

MAX_PARTS = 64
"""SessionParts of one item."""
Id = Name
Sound = str
"""Base64; the limit of a message bounds it."""


class InputText(Strict):
    """Text of the user or the system."""

    type: Literal["input_text"]
    text: Text


class UserSound(Strict):
    """Sound of the user in the session's format; with a `transcript` it is not heard again."""

    type: Literal["input_audio"]
    audio: Sound | None = None
    transcript: Text | None = None


class InputImage(Strict):
    """An image of the user, as a data URL."""

    type: Literal["input_image"]
    image_url: Sound
    detail: Literal["auto", "low", "high"] | None = None

    @model_validator(mode="after")
    def _check_url(self) -> InputImage:
        if not self.image_url.startswith("data:"):
            raise InvalidRequest(
                "image_url is a data URL: data:image/png;base64,...", param="image_url"
            )
        return self


class AssistantText(Strict):
    """Text of the assistant."""

    type: Literal["output_text", "text"]
    text: Text


class AssistantSpeech(Strict):
    """Words that the assistant said; their sound is not kept."""

    type: Literal["output_audio", "audio"]
    transcript: Text | None = None
    audio: Sound | None = None


Part = Annotated[
    Annotated[InputText, Tag("input_text")]
    | Annotated[UserSound, Tag("input_audio")]
    | Annotated[InputImage, Tag("input_image")]
    | Annotated[AssistantText, Tag("output_text")]
    | Annotated[AssistantSpeech, Tag("output_audio")],
    Discriminator(
        lambda value: {"text": "output_text", "audio": "output_audio"}.get(
            type_of(value), type_of(value)
        )
    ),
]
_OF_ROLE = {
    "system": {"input_text"},
    "user": {"input_text", "input_audio", "input_image"},
    "assistant": {"output_text", "text", "output_audio", "audio"},
}


class _Item(Strict):
    id: Id | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class ClientMessage(_Item):
    """A message of the user, the assistant or the system."""

    type: Literal["message"]
    role: Literal["system", "user", "assistant"]
    content: Annotated[list[Part], Field(max_length=MAX_PARTS)]

    @model_validator(mode="after")
    def _check_parts(self) -> ClientMessage:
        for part in self.content:
            if part.type not in _OF_ROLE[self.role]:
                raise InvalidRequest(
                    f"A message of role {self.role} has no part of type {part.type}.",
                    param="item.content",
                )
        return self


class ClientCall(_Item):
    """A call of a function."""

    type: Literal["function_call"]
    name: Name
    arguments: Text
    call_id: Id | None = None


class ClientCallOutput(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Id
    output: Text


class InputReference(Strict):
    """An item of the conversation, in the input of a response."""

    type: Literal["item_reference"]
    id: Id


Item = Annotated[ClientMessage | ClientCall | ClientCallOutput, Field(discriminator="type")]
InputItem = Annotated[
    ClientMessage | ClientCall | ClientCallOutput | InputReference, Field(discriminator="type")
]


class _Event(Strict):
    event_id: Label | None = None


class SessionUpdate(_Event):
    """Changes settings of the session."""

    type: Literal["session.update"]
    session: JsonObject


class AppendSound(_Event):
    """The user's sound goes on."""

    type: Literal["input_audio_buffer.append"]
    audio: Sound

    def data(self) -> bytes:
        """Return the sound. Raises `InvalidRequest` for base64 that is none."""
        return decoded(self.audio)


class CommitSound(_Event):
    """The sound so far is a message."""

    type: Literal["input_audio_buffer.commit"]


class ClearSound(_Event):
    """The sound so far is forgotten."""

    type: Literal["input_audio_buffer.clear"]


class CreateItem(_Event):
    """Adds an item."""

    type: Literal["conversation.item.create"]
    item: Item
    previous_item_id: Id | None = None


class RetrieveItem(_Event):
    """Shows an item."""

    type: Literal["conversation.item.retrieve"]
    item_id: Id


class DeleteItem(_Event):
    """Removes an item."""

    type: Literal["conversation.item.delete"]
    item_id: Id


class TruncateItem(_Event):
    """Cuts what was said to what was heard."""

    type: Literal["conversation.item.truncate"]
    item_id: Id
    content_index: Annotated[int, Field(ge=0)]
    audio_end_ms: Annotated[int, Field(ge=0)]


class ResponseSound(Strict):
    """The sound of one response."""

    output: JsonObject | None = None


class ResponseFields(Refusing):
    """The settings of one response; those that are left out are the session's."""

    refused = {  # noqa: RUF012 - read only, as in the base class
        "prompt": RefusedField("write it into instructions."),
        "reasoning": RefusedField("reasoning is left out of answers.", ({},)),
        "parallel_tool_calls": RefusedField("calls come one after another.", (True, False)),
    }
    audio: ResponseSound | None = None
    conversation: Literal["auto", "none"] = "auto"
    input: Annotated[list[InputItem], Field(max_length=1024)] | None = None
    instructions: Text | None = None
    max_output_tokens: Any = None
    max_response_output_tokens: Any = None
    metadata: Metadata | None = None
    output_modalities: Any = None
    tool_choice: Any = None
    tools: Any = None

    def overrides(self) -> dict[str, Any]:
        """The fields that replace settings of the session, which check them."""
        own = {"conversation", "input", "metadata"}
        return self.model_dump(exclude_unset=True, exclude_none=True, exclude=own)


class CreateResponse(_Event):
    """Asks for an answer."""

    type: Literal["response.create"]
    response: ResponseFields | None = None


class CancelResponse(_Event):
    """Ends an answer early."""

    type: Literal["response.cancel"]
    response_id: Id | None = None


class ClearOutput(_Event):
    """The sound that was sent is not played."""

    type: Literal["output_audio_buffer.clear"]


ClientEvent = (
    SessionUpdate
    | AppendSound
    | CommitSound
    | ClearSound
    | CreateItem
    | RetrieveItem
    | DeleteItem
    | TruncateItem
    | CreateResponse
    | CancelResponse
    | ClearOutput
)
_KINDS: dict[str, type[ClientEvent]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(ClientEvent)
}
_ITEMS = "an item is a message, a function_call or a function_call_output"


def parse_event(value: Any) -> ClientEvent:
    """Return the event. Raises `InvalidRequest`s, `UnsupportedOption` for kinds of items."""
    if not isinstance(value, dict):
        raise InvalidRequest("An event is a JSON object.")
    kind = _KINDS.get(type_of(value))
    if kind is None:
        known = ", ".join(_KINDS)
        raise InvalidRequest(
            f"There is no event {type_of(value)[:60]!a}; clients send {known}.", param="type"
        )
    if kind is CreateItem and type_of(value.get("item")).startswith("mcp"):
        raise UnsupportedOption(f"No MCP server is called here: {_ITEMS}.", param="item.type")
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise invalid_body(kind, error) from error


def parse_message(text: str | bytes) -> Any:
    """Return the JSON of a message. Raises `InvalidRequest`."""
    if isinstance(text, bytes):
        raise InvalidRequest("Events are text messages; sound is base64 in an event.")
    return parse_json(text.encode())


def event_id_of(value: Any) -> str | None:
    """Return the id that a client gave an event, if it can be read."""
    found = value.get("event_id") if isinstance(value, dict) else None
    return found[:512] if isinstance(found, str) else None


def decoded(text: str) -> bytes:
    """Decode base64. Raises `InvalidRequest`."""
    try:
        return binascii.a2b_base64(text.encode(), strict_mode=True)
    except (ValueError, UnicodeEncodeError) as error:
        raise InvalidRequest("The sound is not valid base64.", param="audio") from error


def unheard(item: Item) -> list[bytes]:
    """Return the sound of an item that has no transcript yet, at most one. Raises as `decoded`."""
    if not isinstance(item, ClientMessage):
        return []
    sounds = [
        part for part in item.content if isinstance(part, UserSound) and part.transcript is None
    ]
    if len(sounds) > 1:
        raise UnsupportedOption("An item has at most one sound; send several items.")
    if any(part.audio is None for part in sounds):
        raise InvalidRequest("A part of type input_audio needs audio.", param="item.content")
    return [decoded(part.audio or "") for part in sounds]


def error_fields(error: BaseException) -> dict[str, Any]:
    """Return an error as events have it."""
    public: TriptychError = to_public(error)
    body = OPENAI.error(public, "").model_dump()["error"]
    return {name: body[name] for name in ("type", "code", "message", "param")}


def error_event(fields: dict[str, Any], event_id: str | None = None) -> dict[str, Any]:
    """Return the event of an error that the session outlives; `event_id` is the client's."""
    return {"type": "error", "error": {**fields, "event_id": event_id}}


EXPECTED = (TriptychError, RequestValidationError)
"""Errors that an event may cause, and that the session outlives."""
