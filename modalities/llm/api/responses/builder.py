"""Builds the events of an answer, and the answer, from the deltas of a generation.

Owns the order of events: an item begins, its part begins and grows, both end before the next item.
Knows neither HTTP nor the store.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from triptych.core.errors import TriptychError
from triptych.modalities.llm.api.replies import (
    ChatLogprob,
    UsageReply,
    chat_logprob,
    new_call_id,
)
from triptych.modalities.llm.api.responses.events import (
    CallArgumentsDelta,
    CallArgumentsDone,
    ContentPartEvent,
    OutputItemEvent,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseEvent,
    ResponseState,
)
from triptych.modalities.llm.api.responses.items import ItemStatus, new_id
from triptych.modalities.llm.api.responses.names import FunctionPlace
from triptych.modalities.llm.api.responses.replies import (
    FunctionCallOutput,
    MessageOutput,
    OutputItem,
    OutputText,
    ReasoningOutput,
    ReasoningText,
    ResponseFailure,
    ResponseReply,
    ResponseStatus,
    ResponseUsage,
)
from triptych.modalities.llm.api.samples import FinishReason, SampleDelta
from triptych.modalities.llm.api.tools.pieces import (
    AnswerPiece,
    CallArguments,
    CallStart,
    Reasoning,
    Words,
)

Event = TypeVar("Event", bound=ResponseEvent)
Events = Iterator[ResponseEvent]


class ResponseBuilder:
    """One answer under construction.

    `begun` are the first fields of a `ResponseReply`, `places` the client's names of functions by
    the model's names.
    """

    def __init__(
        self,
        begun: Mapping[str, Any],
        places: Mapping[str, FunctionPlace] = MappingProxyType({}),
        *,
        has_logprobs: bool,
    ) -> None:
        self._begun = begun
        self._places = places
        self._has_logprobs = has_logprobs
        self._num_events = 0
        self._open: _GrowingItem | None = None
        self._output: list[OutputItem] = []
        self._logprobs: list[ChatLogprob] = []  # of text that is yet to come
        self._finish: FinishReason | None = None
        self.response = self._with("in_progress")

    def begin(self, *, is_queued: bool = False) -> Events:
        """The first events."""
        if is_queued:
            self.response = self._with("queued")
        yield self._state("response.created")
        yield self._state("response.queued" if is_queued else "response.in_progress")

    def start(self) -> Events:
        """Begin a queued answer."""
        self.response = self._with("in_progress")
        yield self._state("response.in_progress")

    def push(self, delta: SampleDelta) -> Events:
        """The events of a delta."""
        self._finish = delta.finish_reason or self._finish
        if self._has_logprobs:
            self._logprobs += map(chat_logprob, delta.logprobs)
        for piece in delta.shown:
            yield from self._piece(piece)
        if self._open is not None and not isinstance(self._open, _GrowingMessage):
            self._logprobs = []  # of reasoning and calls

    def close(self, usage: UsageReply) -> Events:
        """End a complete answer, or one of maximum length; `last` ends its stream."""
        is_whole = self._finish != "length"
        if self._open is None and not self._output:
            yield from self._begin_item(_GrowingMessage(len(self._output)))
        yield from self._end_item("completed" if is_whole else "incomplete")
        counts = ResponseUsage.of(usage)
        if is_whole:
            self.response = self._with("completed", completed_at=int(time.time()), usage=counts)
        else:
            details = {"reason": "max_output_tokens"}
            self.response = self._with("incomplete", incomplete_details=details, usage=counts)

    def fail(self, error: TriptychError) -> None:
        """End an answer that failed."""
        self._break_off()
        self.response = self._with("failed", error=ResponseFailure.of(error))

    def lose(self, error: TriptychError) -> None:
        """End an answer that cannot be stored, without its output."""
        self._output = []
        self.fail(error)

    def cancel(self) -> None:
        """End an answer that its client has cancelled."""
        self._break_off()
        self.response = self._with("cancelled")

    def last(self) -> ResponseState:
        """The last event of an answer that has ended."""
        status = self.response.status
        name: Any = f"response.{'incomplete' if status == 'cancelled' else status}"
        return ResponseState(type=name, sequence_number=self._num_events, response=self.response)

    def forget(self) -> None:
        """Mark the answer as not stored."""
        self.response.store = False

    def event(self, kind: type[Event], name: str, /, **fields: Any) -> Event:
        """The next event."""
        number = self._num_events
        self._num_events += 1
        return kind(type=name, sequence_number=number, **fields)

    def take_logprobs(self) -> list[ChatLogprob]:
        """Take the log-probabilities of the next text."""
        logprobs, self._logprobs = self._logprobs, []
        return logprobs

    def _with(self, status: ResponseStatus, **fields: Any) -> ResponseReply:
        usage = fields.pop("usage", None)
        known = {**self._begun, **fields}
        return ResponseReply(status=status, output=list(self._output), usage=usage, **known)

    def _state(self, name: str) -> ResponseState:
        return self.event(ResponseState, name, response=self.response)

    def _piece(self, piece: AnswerPiece) -> Events:
        match piece:
            case Words(text):
                yield from self._in(_GrowingMessage)
                yield from self._grow(text)
            case Reasoning(text):
                self._logprobs = []
                yield from self._in(_GrowingReasoning)
                yield from self._grow(text)
            case CallStart(name):
                self._logprobs = []
                yield from self._end_item("completed")
                place = self._places.get(name, FunctionPlace(name))
                yield from self._begin_item(_GrowingCall(len(self._output), place))
            case CallArguments(text):
                yield from self._grow(text)

    def _in(self, kind: type[_GrowingMessage | _GrowingReasoning]) -> Events:
        """Begin an item of that kind unless one is open."""
        if not isinstance(self._open, kind):
            yield from self._end_item("completed")
            yield from self._begin_item(kind(len(self._output)))

    def _begin_item(self, item: _GrowingItem) -> Events:
        self._open = item
        shown = item.output("in_progress", is_empty=True)
        yield self.event(
            OutputItemEvent, "response.output_item.added", output_index=item.index, item=shown
        )
        yield from item.begin(self)

    def _grow(self, text: str) -> Events:
        assert self._open is not None
        if text:
            yield self._open.grow(self, text)

    def _end_item(self, status: ItemStatus) -> Events:
        item, self._open = self._open, None
        if item is None:
            return
        yield from item.end(self)
        whole = item.output(status)
        self._output.append(whole)
        yield self.event(
            OutputItemEvent, "response.output_item.done", output_index=item.index, item=whole
        )

    def _break_off(self) -> None:
        if self._open is not None:
            self._output.append(self._open.output("incomplete"))
            self._open = None


class _GrowingItem(ABC):
    """An item that grows."""

    prefix: str

    def __init__(self, index: int) -> None:
        self.index = index
        self.id = new_id(self.prefix)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    @property
    def place(self) -> dict[str, Any]:
        """The fields that locate the item in its events."""
        return {"item_id": self.id, "output_index": self.index}

    @property
    def part_place(self) -> dict[str, Any]:
        """The fields that locate the item's only part in its events."""
        return {**self.place, "content_index": 0}

    @abstractmethod
    def output(self, status: ItemStatus, *, is_empty: bool = False) -> OutputItem:
        """The item so far, or without content if `is_empty`."""

    @abstractmethod
    def begin(self, answer: ResponseBuilder) -> Events:
        """Begin the item's part."""

    @abstractmethod
    def grow(self, answer: ResponseBuilder, text: str) -> ResponseEvent:
        """Add text to the item."""

    @abstractmethod
    def end(self, answer: ResponseBuilder) -> Events:
        """End the item's part."""


class _GrowingMessage(_GrowingItem):
    prefix = "msg"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs: list[ChatLogprob] = []

    def _part(self, text: str) -> OutputText:
        logprobs = list(self._logprobs) if text else []
        return OutputText(type="output_text", text=text, annotations=[], logprobs=logprobs)

    def output(self, status: ItemStatus, *, is_empty: bool = False) -> MessageOutput:
        content = [] if is_empty else [self._part(self.text)]
        return MessageOutput(
            id=self.id, type="message", role="assistant", status=status, content=content
        )

    def begin(self, answer: ResponseBuilder) -> Events:
        name = "response.content_part.added"
        yield answer.event(ContentPartEvent, name, **self.part_place, part=self._part(""))

    def grow(self, answer: ResponseBuilder, text: str) -> ResponseEvent:
        logprobs = answer.take_logprobs()
        self._pieces.append(text)
        self._logprobs += logprobs
        name = "response.output_text.delta"
        return answer.event(OutputTextDelta, name, **self.part_place, delta=text, logprobs=logprobs)

    def end(self, answer: ResponseBuilder) -> Events:
        self._logprobs += answer.take_logprobs()
        place = self.part_place
        yield answer.event(
            OutputTextDone,
            "response.output_text.done",
            **place,
            text=self.text,
            logprobs=list(self._logprobs),
        )
        part = self._part(self.text)
        yield answer.event(ContentPartEvent, "response.content_part.done", **place, part=part)


class _GrowingReasoning(_GrowingItem):
    prefix = "rs"

    def output(self, status: ItemStatus, *, is_empty: bool = False) -> ReasoningOutput:
        content = [] if is_empty else [ReasoningText(type="reasoning_text", text=self.text)]
        return ReasoningOutput(
            id=self.id, type="reasoning", status=status, summary=[], content=content
        )

    def begin(self, answer: ResponseBuilder) -> Events:
        part = ReasoningText(type="reasoning_text", text="")
        name = "response.content_part.added"
        yield answer.event(ContentPartEvent, name, **self.part_place, part=part)

    def grow(self, answer: ResponseBuilder, text: str) -> ResponseEvent:
        self._pieces.append(text)
        name = "response.reasoning_text.delta"
        return answer.event(ReasoningTextDelta, name, **self.part_place, delta=text)

    def end(self, answer: ResponseBuilder) -> Events:
        place = self.part_place
        name = "response.reasoning_text.done"
        yield answer.event(ReasoningTextDone, name, **place, text=self.text)
        part = ReasoningText(type="reasoning_text", text=self.text)
        yield answer.event(ContentPartEvent, "response.content_part.done", **place, part=part)


class _GrowingCall(_GrowingItem):
    prefix = "fc"

    def __init__(self, index: int, place: FunctionPlace) -> None:
        super().__init__(index)
        self._name = place.name
        self._named = place._asdict() if place.namespace else {"name": place.name}
        self._call_id = new_call_id()

    def output(self, status: ItemStatus, *, is_empty: bool = False) -> FunctionCallOutput:
        return FunctionCallOutput(
            id=self.id,
            type="function_call",
            status=status,
            call_id=self._call_id,
            arguments=self.text,
            **self._named,
        )

    def begin(self, answer: ResponseBuilder) -> Events:
        yield from ()

    def grow(self, answer: ResponseBuilder, text: str) -> ResponseEvent:
        self._pieces.append(text)
        name = "response.function_call_arguments.delta"
        return answer.event(CallArgumentsDelta, name, **self.place, delta=text)

    def end(self, answer: ResponseBuilder) -> Events:
        name = "response.function_call_arguments.done"
        done = {"name": self._name, "arguments": self.text}
        yield answer.event(CallArgumentsDone, name, **self.place, **done)
