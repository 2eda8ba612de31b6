"""The answers of the OpenAI text API, whole and in chunks.

Owns their shape, and how text deltas become one. A field is sent if it was set: OpenAI sends some
fields as null and leaves others out. Knows nothing of HTTP.
"""

from __future__ import annotations

import codecs
import hashlib
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from string import ascii_letters, digits
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel

from triptych.core.http.models import ModelCard
from triptych.modalities.llm.api.service import FinishReason, SampleDelta, TokenText, TokenUsage
from triptych.modalities.llm.api.text import TextModel
from triptych.modalities.llm.api.tools.pieces import (
    Answer,
    AnswerPiece,
    CallArguments,
    CallStart,
    Thought,
    Words,
)

_LEAST_LOGPROB = -9999.0  # JSON has no minus infinity; OpenAI sends this


class PromptDetails(BaseModel):
    """Where prompt tokens came from.

    Where there are pictures, `image_tokens` are those that they fill, and `cached_images` is how
    many of the pictures did not have to be encoded.
    """

    cached_tokens: int
    image_tokens: int | None = None
    cached_images: int | None = None


class OutputDetails(BaseModel):
    """What output tokens were for."""

    reasoning_tokens: int


class UsageReply(BaseModel):
    """Token counts of a request. A prompt counts once, however many samples it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: OutputDetails | None = None


class TopLogprob(BaseModel):
    """One token and its log-probability."""

    token: str
    bytes: list[int]
    logprob: float


class ChatLogprob(TopLogprob):
    """A token of the answer, with the likeliest alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat answer."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a text completion, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionReply(BaseModel):
    """A function and its arguments, which are JSON text; or more of that text."""

    name: str = ""
    arguments: str


class ToolCallReply(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionReply


class ToolCallDelta(BaseModel):
    """A piece of the call with this index."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionReply


class AnswerMessage(BaseModel):
    """A chat answer; `reasoning` is `reasoning_content` by another name."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallReply] = []


class MessageDelta(BaseModel):
    """A piece of a chat answer."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChoice(BaseModel):
    """One sample of a chat answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatChunkChoice(BaseModel):
    """A piece of one sample."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class CompletionChoice(BaseModel):
    """One sample of a text completion, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class _Reply(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatReply(_Reply):
    """Answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: UsageReply


class ChatChunk(_Reply):
    """One event of a streamed chat answer."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: UsageReply | None = None


class CompletionReply(_Reply):
    """Answer of `/v1/completions`, or one event of it."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: UsageReply | None = None


Chunk = ChatChunk | CompletionReply
ReplyT = TypeVar("ReplyT", bound=_Reply)


class Tokens(BaseModel):
    """Answer of `/tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Prompt(BaseModel):
    """Answer of `/detokenize`."""

    prompt: str


class UsageTotals:
    """Adds up the token counts of a request's samples."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._last: dict[int, TokenUsage] = {}

    def add(self, delta: SampleDelta) -> None:
        """Take note of a sample's latest counts."""
        self._last[delta.index] = delta.usage

    def total(self) -> UsageReply:
        """The counts of the request so far."""
        firsts = [use for index, use in self._last.items() if index % self._num_samples == 0]
        prompt = sum(use.num_prompt_tokens for use in firsts)
        output = sum(use.num_output_tokens for use in self._last.values())
        details = PromptDetails(cached_tokens=sum(use.num_cached_tokens for use in firsts))
        if image := sum(use.num_image_tokens for use in firsts):
            details.image_tokens = image
            details.cached_images = sum(use.num_cached_images for use in firsts)
        usage = UsageReply(
            prompt_tokens=prompt,
            completion_tokens=output,
            total_tokens=prompt + output,
            prompt_tokens_details=details,
        )
        if thought := sum(use.num_reasoning_tokens for use in self._last.values()):
            usage.completion_tokens_details = OutputDetails(reasoning_tokens=thought)
        return usage


class _Offsets:
    """Where tokens begin in a text: a token that begins within a character, at that character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def next(self, shown: bytes) -> int:
        """Where the next token begins, of which the text has `shown`."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(shown))
        return offset


class Shape(ABC):
    """How one route dresses deltas. Nothing but `usage_chunk` and `reply` holds token counts."""

    _id: ClassVar[str]
    _reply: ClassVar[type[Chunk | ChatReply]]
    _chunk: ClassVar[type[Chunk]]

    def __init__(
        self, model: TextModel, call_id: str, *, has_logprobs: bool, has_usage: bool
    ) -> None:
        self._head: dict[str, Any] = {
            "id": f"{self._id}-{call_id}",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": _fingerprint(model),
        }
        self._has_logprobs = has_logprobs
        self._no_usage: dict[str, Any] = {"usage": None} if has_usage else {}
        self._begun: set[int] = set()
        self._num_calls: Counter[int] = Counter()
        self._offsets: defaultdict[int, _Offsets] = defaultdict(_Offsets)

    @abstractmethod
    def chunks(self, delta: SampleDelta) -> Iterator[Chunk]:
        """Events for one delta: none where there is nothing to show."""

    @abstractmethod
    def _choice(self, index: int, deltas: Sequence[SampleDelta]) -> ChatChoice | CompletionChoice:
        """A whole sample, or a piece of one."""

    def usage_chunk(self, usage: UsageReply) -> Chunk:
        """The last event of a stream that asked for usage: one without choices."""
        return self._made(self._chunk, [], usage=usage)

    def reply(self, samples: Sequence[Sequence[SampleDelta]], usage: UsageReply) -> BaseModel:
        """The whole answer, from every sample's deltas in order."""
        choices = [self._choice(index, deltas) for index, deltas in enumerate(samples)]
        return self._made(self._reply, choices, usage=usage)

    def _made(self, kind: type[ReplyT], choices: Sequence[BaseModel], **usage: Any) -> ReplyT:
        """Sets `object`, too: fields that were not set are not sent."""
        fields = {"object": kind.model_fields["object"].default, "choices": choices, **usage}
        return kind(**self._head, **fields)


class ChatShape(Shape):
    """Chat answers."""

    _id, _reply, _chunk = "chatcmpl", ChatReply, ChatChunk

    def chunks(self, delta: SampleDelta) -> Iterator[Chunk]:
        """The role first, once; then text; then why it ended."""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            yield self._piece(delta.index, MessageDelta(role="assistant", content=""))
        logprobs = self._logprobs(delta.logprobs)
        for piece in delta.shown or ([Words("")] if delta.logprobs else []):
            yield self._piece(delta.index, self._delta(delta.index, piece), logprobs=logprobs)
            logprobs = self._logprobs(())
        if delta.finish_reason is not None:
            yield self._piece(delta.index, MessageDelta(), finish=delta.finish_reason)

    def _choice(self, index: int, deltas: Sequence[SampleDelta]) -> ChatChoice:
        finish = deltas[-1].finish_reason
        assert finish is not None
        return ChatChoice(
            index=index,
            message=_message(Answer.of(piece for delta in deltas for piece in delta.shown)),
            logprobs=self._logprobs([entry for delta in deltas for entry in delta.logprobs]),
            finish_reason=finish,
        )

    def _delta(self, index: int, piece: AnswerPiece) -> MessageDelta:
        match piece:
            case Words(text):
                return MessageDelta(content=text)
            case Thought(text):
                return MessageDelta(reasoning_content=text, reasoning=text)
            case CallStart(name):
                self._num_calls[index] += 1
                call = FunctionReply(name=name, arguments="")
                new: dict[str, Any] = {"id": new_call_id(), "type": "function", "function": call}
            case CallArguments(text):
                new = {"function": FunctionReply(arguments=text)}
        return MessageDelta(tool_calls=[ToolCallDelta(index=self._num_calls[index] - 1, **new)])

    def _piece(
        self,
        index: int,
        delta: MessageDelta,
        *,
        logprobs: ChatLogprobs | None = None,
        finish: FinishReason | None = None,
    ) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish)
        return self._made(ChatChunk, [choice], **self._no_usage)

    def _logprobs(self, entries: Sequence[TokenText]) -> ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        return ChatLogprobs(content=[chat_logprob(entry) for entry in entries], refusal=None)


class CompletionShape(Shape):
    """Text completions."""

    _id, _reply, _chunk = "cmpl", CompletionReply, CompletionReply

    def chunks(self, delta: SampleDelta) -> Iterator[Chunk]:
        """At most one event."""
        if delta.text or delta.logprobs or delta.finish_reason is not None:
            choice = self._choice(delta.index, [delta])
            yield self._made(CompletionReply, [choice], **self._no_usage)

    def _choice(self, index: int, deltas: Sequence[SampleDelta]) -> CompletionChoice:
        entries = [entry for delta in deltas for entry in delta.logprobs]
        return CompletionChoice(
            index=index,
            text="".join(delta.text for delta in deltas),
            logprobs=self._logprobs(index, entries) if self._has_logprobs else None,
            finish_reason=deltas[-1].finish_reason,
        )

    def _logprobs(self, index: int, entries: Sequence[TokenText]) -> CompletionLogprobs:
        """The first token of a prompt has no log-probability."""
        return CompletionLogprobs(
            tokens=[entry.text for entry in entries],
            token_logprobs=[
                None if entry.logprob is None else _finite(entry.logprob) for entry in entries
            ],
            top_logprobs=[
                None
                if entry.logprob is None
                else {top.text: _finite(top.logprob or 0.0) for top in (*entry.top, entry)}
                for entry in entries
            ],
            text_offset=[self._offsets[index].next(entry.shown) for entry in entries],
        )


def _message(answer: Answer) -> AnswerMessage:
    """A whole answer; one of calls alone has no content."""
    found: dict[str, Any] = {}
    if answer.reasoning:
        found |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if answer.calls:
        found["tool_calls"] = [
            ToolCallReply(
                id=new_call_id(),
                type="function",
                function=FunctionReply(name=call.name, arguments=call.arguments),
            )
            for call in answer.calls
        ]
    text = None if answer.calls and not answer.text else answer.text
    return AnswerMessage(role="assistant", content=text, refusal=None, **found)


def chat_logprob(entry: TokenText) -> ChatLogprob:
    """A token of an answer, with its log-probability."""
    top = [TopLogprob(**_token_fields(other)) for other in entry.top]
    return ChatLogprob(**_token_fields(entry), top_logprobs=top)


def new_call_id() -> str:
    """Nine letters and digits, since Mistral's templates take no other."""
    return "".join(secrets.choice(ascii_letters + digits) for _ in range(9))


def _token_fields(entry: TokenText) -> dict[str, Any]:
    logprob = _finite(entry.logprob or 0.0)
    return {"token": entry.text, "bytes": list(entry.data), "logprob": logprob}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def card_of(model: TextModel, *, sees: bool = False) -> ModelCard:
    """How `/v1/models` shows `model`."""
    return ModelCard(
        id=model.name,
        created=model.created,
        task="chat",
        max_model_len=model.context_length,
        input_modalities=["text", "image"] if sees else None,
    )


def _fingerprint(model: TextModel) -> str:
    """Changes when the weights or this program do, and with them perhaps the answers."""
    identity = f"{version('triptych')} {model.name} {model.digest}"
    return f"fp_{hashlib.sha256(identity.encode()).hexdigest()[:10]}"
