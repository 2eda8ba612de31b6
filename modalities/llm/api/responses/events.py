"""The events of a streamed answer of the Responses API.

Owns their shape. Each has the number of its place in the stream. Knows no order.
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
    """What all events have."""

    type: str
    sequence_number: int


class ResponseState(ResponseEvent):
    """The answer as a whole: at the beginning, and at the end."""

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
    """An item begins, or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _InItem(ResponseEvent):
    """Something of an item."""

    item_id: str
    output_index: int


class _InContent(_InItem):
    """Something of a part of an item."""

    content_index: int


class ContentPartEvent(_InContent):
    """A part of an item begins, or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class OutputTextDelta(_InContent):
    """More text."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ChatLogprob]


class OutputTextDone(_InContent):
    """All of the text."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ChatLogprob]


class ReasoningTextDelta(_InContent):
    """More reasoning."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningTextDone(_InContent):
    """All of the reasoning."""

    type: Literal["response.reasoning_text.done"]
    text: str


class CallArgumentsDelta(_InItem):
    """More of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class CallArgumentsDone(_InItem):
    """All of a call's arguments."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class ErrorEvent(ResponseEvent):
    """Why the stream ends here."""

    type: Literal["error"]
    code: str
    message: str
    param: str | None


class WrittenEvent(ResponseEvent, WrittenDocument):
    """An event as JSON: just written, or as it was kept."""

    @classmethod
    def kept(cls, line: bytes) -> Self:
        """The event that was kept as that line, of which nothing else is read."""
        head = decode_json(line, _Head)
        return cls(type=head.type, sequence_number=head.sequence_number, json_line=line)


class _Head(msgspec.Struct):
    type: str
    sequence_number: int


WHOLE_EVENTS = (ResponseState, OutputItemEvent, ContentPartEvent, OutputTextDone)
"""Those that may say all of an answer again, log-probabilities included."""
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
