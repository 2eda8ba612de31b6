"""The answers of Anthropic's API: a message in blocks, whole and as events.

Owns their fields, their order, and how text deltas become events; a whole message is assembled from
its events. A field is sent if it was set. Knows nothing of HTTP.
"""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from triptych.modalities.llm.api.anthropic.blocks import CALL_PREFIX
from triptych.modalities.llm.api.anthropic.protocol import ShownReasoning
from triptych.modalities.llm.api.generation import Generation
from triptych.modalities.llm.api.replies import UsageReply, new_call_id
from triptych.modalities.llm.api.samples import SampleDelta
from triptych.modalities.llm.api.tools.pieces import (
    AnswerPiece,
    CallArguments,
    CallStart,
    Reasoning,
    Words,
)
from triptych.modalities.llm.api.translation import parse_arguments

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TextReply(BaseModel):
    """A block of text."""

    type: Literal["text"]
    text: str


class ThinkingReply(BaseModel):
    """A block of reasoning. Its signature is a digest, which is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseReply(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


BlockReply: TypeAlias = TextReply | ThinkingReply | ToolUseReply


class ThinkingTokens(BaseModel):
    """Kinds of output tokens."""

    thinking_tokens: int


class MessageUsage(BaseModel):
    """Token counts; `input_tokens` are the prompt's tokens that were not found in the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens

    @classmethod
    def of(cls, usage: UsageReply) -> MessageUsage:
        """The counts of chat under this API's names."""
        cached = usage.prompt_tokens_details.cached_tokens
        thinking = ThinkingTokens(thinking_tokens=usage.completion_tokens_details.reasoning_tokens)
        return cls(
            input_tokens=usage.prompt_tokens - cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=thinking,
        )


class MessageReply(BaseModel):
    """Answer of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockReply]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(BaseModel):
    """The first event: a message without content."""

    type: Literal["message_start"]
    message: MessageReply


class BlockStart(BaseModel):
    """The beginning of a block."""

    type: Literal["content_block_start"]
    index: int
    content_block: BlockReply


class TextPiece(BaseModel):
    """A further piece of text."""

    type: Literal["text_delta"]
    text: str


class ThinkingPiece(BaseModel):
    """A further piece of reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class SignaturePiece(BaseModel):
    """The signature of a block of reasoning, at its end."""

    type: Literal["signature_delta"]
    signature: str


class InputPiece(BaseModel):
    """A further piece of the JSON text of a call's input."""

    type: Literal["input_json_delta"]
    partial_json: str


Piece: TypeAlias = TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class BlockDelta(BaseModel):
    """A further piece of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: Piece


class BlockStop(BaseModel):
    """The end of a block."""

    type: Literal["content_block_stop"]
    index: int


class StopDetail(BaseModel):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageEnd(BaseModel):
    """Why a message ended, with all its token counts."""

    type: Literal["message_delta"]
    delta: StopDetail
    usage: MessageUsage


class MessageStop(BaseModel):
    """The last event."""

    type: Literal["message_stop"]


class Ping(BaseModel):
    """An event without content, sent as a heartbeat."""

    type: Literal["ping"]


Event: TypeAlias = MessageStart | BlockStart | BlockDelta | BlockStop | MessageEnd | MessageStop


class TokenCount(BaseModel):
    """Answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessageFormatter:
    """Formats the deltas of one answer.

    `is_cut`: the context, and not `max_tokens`, limits the length of the answer.
    """

    def __init__(
        self, model: str, call_id: str, *, reasoning: ShownReasoning = "whole", is_cut: bool = False
    ) -> None:
        self._head: dict[str, Any] = {
            "id": f"msg_{call_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._shown_reasoning = reasoning
        self._is_cut = is_cut
        self._index = -1
        self._open: type[AnswerPiece] | None = None
        self._reasoning = hashlib.sha256()

    async def events(self, generation: Generation) -> AsyncGenerator[Event, None]:
        """The events of an answer while it is generated."""
        has_begun = False
        async with aclosing(generation.deltas) as deltas:
            async for delta in deltas:
                usage = MessageUsage.of(generation.usage.total())
                if not has_begun:
                    has_begun = True
                    message = MessageReply(**self._head, usage=usage)
                    yield MessageStart(type="message_start", message=message)
                for piece in delta.shown:
                    for event in self._piece(piece):
                        yield event
                if delta.finish_reason is not None:
                    for event in self._end(delta, usage):
                        yield event

    def _piece(self, piece: AnswerPiece) -> Iterator[Event]:
        match piece:
            case Words(text):
                if self._open is not Words:
                    yield from self._next(Words, TextReply(type="text", text=""))
                yield self._delta(TextPiece(type="text_delta", text=text))
            case Reasoning() if self._shown_reasoning == "hidden":
                return
            case Reasoning(text):
                if self._open is not Reasoning:
                    block = ThinkingReply(type="thinking", thinking="", signature="")
                    yield from self._next(Reasoning, block)
                self._reasoning.update(text.encode())
                if self._shown_reasoning == "whole":
                    yield self._delta(ThinkingPiece(type="thinking_delta", thinking=text))
            case CallStart(name):
                call_id = CALL_PREFIX + new_call_id()
                call = ToolUseReply(type="tool_use", id=call_id, name=name, input={})
                yield from self._next(CallStart, call)
            case CallArguments(text):
                yield self._delta(InputPiece(type="input_json_delta", partial_json=text))

    def _next(self, kind: type[AnswerPiece], block: BlockReply) -> Iterator[Event]:
        """Begin another block."""
        yield from self._close()
        self._index += 1
        self._open = kind
        yield BlockStart(type="content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[Event]:
        """End the open block, if any."""
        if self._open is None:
            return
        if self._open is Reasoning:
            signature = base64.b64encode(self._reasoning.digest()).decode()
            yield self._delta(SignaturePiece(type="signature_delta", signature=signature))
            self._reasoning = hashlib.sha256()
        self._open = None
        yield BlockStop(type="content_block_stop", index=self._index)

    def _delta(self, piece: Piece) -> BlockDelta:
        return BlockDelta(type="content_block_delta", index=self._index, delta=piece)

    def _end(self, delta: SampleDelta, usage: MessageUsage) -> Iterator[Event]:
        yield from self._close()
        yield MessageEnd(type="message_delta", delta=self._stop(delta), usage=usage)
        yield MessageStop(type="message_stop")

    def _stop(self, delta: SampleDelta) -> StopDetail:
        match delta.finish_reason, delta.stop_reason:
            case "tool_calls", _:
                return StopDetail(stop_reason="tool_use", stop_sequence=None)
            case "length", _:
                reason: StopReason = "max_tokens"
                if self._is_cut:
                    reason = "model_context_window_exceeded"
                return StopDetail(stop_reason=reason, stop_sequence=None)
            case _, str(text):
                return StopDetail(stop_reason="stop_sequence", stop_sequence=text)
        return StopDetail(stop_reason="end_turn", stop_sequence=None)


async def whole_message(events: AsyncIterator[Event]) -> MessageReply:
    """Assemble the message from its events."""
    found: dict[str, Any] = {}
    starts: list[BlockReply] = []
    texts: list[defaultdict[str, list[str]]] = []
    async for event in events:
        match event:
            case MessageStart(message=message):
                found = dict(message)
            case BlockStart(content_block=block):
                starts.append(block)
                texts.append(defaultdict(list))
            case BlockDelta(delta=delta):
                for name, text in delta.model_dump(exclude={"type"}).items():
                    texts[-1][name].append(text)
            case MessageEnd(delta=stop, usage=usage):
                found |= {**dict(stop), "usage": usage}
    blocks = [_whole_block(*pair) for pair in zip(starts, texts, strict=True)]
    return MessageReply(**{**found, "content": blocks})


def _whole_block(start: BlockReply, texts: Mapping[str, Sequence[str]]) -> BlockReply:
    if isinstance(start, ToolUseReply):
        return start.model_copy(update={"input": parse_arguments("".join(texts["partial_json"]))})
    return start.model_copy(update={name: "".join(parts) for name, parts in texts.items()})
