"""The events of a streamed answer of the Responses API.

Owns their fields. Each event has its sequence number. Knows no order of events.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

import msgspec
from pydantic import BaseModel, Field

from triptych.core.http.sse import WrittenDocument
from triptych.core.process.typed import decode_json
from triptych.modalities.llm.api.replies import ChatLogprob
from triptych.modalities.llm.api.responses.replies import (
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseReply,
)


class ResponseEvent(BaseModel):
    """The common fields of all events."""

    type: str
    sequence_number: int


class ResponseState(ResponseEvent):
    """The whole answer, at the beginning and at the end."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseReply


class OutputItemEvent(ResponseEvent):
    """The beginning of an item, or the complete item."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _InItem(ResponseEvent):
    """An event about an item."""

    item_id: str
    output_index: int


class _InContent(_InItem):
    """An event about a part of an item."""

    content_index: int


class ContentPartEvent(_InContent):
    """The beginning of a part of an item, or the complete part."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class OutputTextDelta(_InContent):
    """A further piece of text."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ChatLogprob]


class OutputTextDone(_InContent):
    """The complete text of a part."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ChatLogprob]


class ReasoningTextDelta(_InContent):
    """A further piece of reasoning."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningTextDone(_InContent):
    """The complete reasoning."""

    type: Literal["response.reasoning_text.done"]
    text: str


class CallArgumentsDelta(_InItem):
    """A further piece of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class CallArgumentsDone(_InItem):
    """The complete arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class ErrorEvent(ResponseEvent):
    """The error that ends the stream."""

    type: Literal["error"]
    code: str
    message: str
    param: str | None


class WrittenEvent(ResponseEvent, WrittenDocument):
    """An event as JSON: just serialized, or as it was stored."""

    @classmethod
    def kept(cls, line: bytes) -> Self:
        """The event that was stored as a line, of which only the head is parsed."""
        head = decode_json(line, _Head)
        return cls(type=head.type, sequence_number=head.sequence_number, json_line=line)


class _Head(msgspec.Struct):
    type: str
    sequence_number: int


WHOLE_EVENTS = (ResponseState, OutputItemEvent, ContentPartEvent, OutputTextDone)
"""The events that may contain the whole answer, including log-probabilities."""
STREAM_EVENTS: tuple[type[ResponseEvent], ...] = (
    ResponseState,
    OutputItemEvent,
    ContentPartEvent,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    CallArgumentsDelta,
    CallArgumentsDone,
)
