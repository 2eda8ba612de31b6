"""Formats text deltas as answers of the OpenAI text API, whole and in chunks.

Owns which fields an answer has, and which of them a request asks for. Knows nothing of HTTP.
"""

from __future__ import annotations

import codecs
import hashlib
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel

from triptych.modalities.llm.api.protocol import ChatRequest, TextRequest
from triptych.modalities.llm.api.replies import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatReply,
    Chunk,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    FunctionReply,
    MessageDelta,
    PromptLogprob,
    ReplyHead,
    ToolCallDelta,
    ToolCallReply,
    UsageReply,
    chat_logprob,
    finite_logprob,
    new_call_id,
)
from triptych.modalities.llm.api.samples import PromptTokens, SampleDelta, TokenText
from triptych.modalities.llm.api.text import TextModel
from triptych.modalities.llm.api.tools.pieces import (
    Answer,
    AnswerPiece,
    CallArguments,
    CallStart,
    Reasoning,
    Words,
)

ReplyT = TypeVar("ReplyT", bound=ReplyHead)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDetails:
    """The fields of answers in addition to their text, as requested.

    `model` is the name that the caller used, `echoed` a text that each answer begins with.
    """

    model: str
    num_top_logprobs: int | None = None
    num_top_prompt_logprobs: int | None = None
    has_usage: bool = False
    has_token_ids: bool = False
    shows_tokens_as_ids: bool = False
    echoed: str = ""

    @classmethod
    def of(cls, body: TextRequest) -> AnswerDetails:
        """The details that `body` requests."""
        return cls(
            model=body.model,
            num_top_logprobs=body.num_top_logprobs,
            num_top_prompt_logprobs=body.prompt_logprobs,
            has_usage=body.has_usage_chunk,
            has_token_ids=bool(body.return_token_ids),
            shows_tokens_as_ids=bool(body.return_tokens_as_token_ids),
            echoed=body.echoed if isinstance(body, ChatRequest) else "",
        )


class _Offsets:
    """Offsets of tokens in a text; a token that begins within a character begins at it."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def next(self, shown: bytes) -> int:
        """The offset of the next token, whose bytes in the text are `shown`."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(shown))
        return offset


class ResponseFormatter(ABC):
    """Formats the deltas of one route. Only `usage_chunk` and `reply` have token counts."""

    _id: ClassVar[str]
    _reply: ClassVar[type[Chunk | ChatReply]]
    _chunk: ClassVar[type[Chunk]]

    def __init__(self, model: TextModel, call_id: str, details: AnswerDetails) -> None:
        self._head: dict[str, Any] = {
            "id": f"{self._id}-{call_id}",
            "created": int(time.time()),
            "model": details.model,
            "system_fingerprint": _fingerprint(model),
        }
        self._details = details
        self._has_logprobs = details.num_top_logprobs is not None
        self._no_usage: dict[str, Any] = {"usage": None} if details.has_usage else {}
        self._begun: set[int] = set()
        self._prompts: dict[int, PromptTokens] = {}  # of samples that have not begun
        self._num_calls: Counter[int] = Counter()
        self._offsets: defaultdict[int, _Offsets] = defaultdict(_Offsets)

    @abstractmethod
    def chunks(self, delta: SampleDelta) -> Iterator[Chunk]:
        """The events for one delta; none for a delta without content."""

    @abstractmethod
    def _choice(self, index: int, deltas: Sequence[SampleDelta]) -> ChatChoice | CompletionChoice:
        """A whole sample, or a piece of one."""

    def usage_chunk(self, usage: UsageReply) -> Chunk:
        """The last event of a stream with usage, which has no choices."""
        return self._made(self._chunk, [], usage=usage)

    def reply(self, samples: Sequence[Sequence[SampleDelta]], usage: UsageReply) -> BaseModel:
        """The whole answer, from every sample's deltas in order."""
        choices = [self._choice(index, deltas) for index, deltas in enumerate(samples)]
        return self._made(self._reply, choices, usage=usage)

    def _made(self, kind: type[ReplyT], choices: Sequence[BaseModel], **more: Any) -> ReplyT:
        """A reply of this `kind` with `object` set: fields that were not set are not sent."""
        fields = {"object": kind.model_fields["object"].default, "choices": choices, **more}
        return kind(**self._head, **fields)

    def _shown(self, entries: Iterable[TokenText]) -> Iterator[TokenText]:
        """Tokens with the requested number of alternatives, by the requested names."""
        return (
            self._with_alternatives(each, self._details.num_top_logprobs or 0) for each in entries
        )

    def _with_alternatives(self, entry: TokenText, num_top: int) -> TokenText:
        top = tuple(self._with_alternatives(each, 0) for each in entry.top[:num_top])
        as_id = self._details.shows_tokens_as_ids
        return replace(entry, top=top, text=f"token_id:{entry.token_id}" if as_id else entry.text)

    def _of_prompt(self, prompt: PromptTokens | None) -> dict[str, Any]:
        """The requested fields about a prompt."""
        fields: dict[str, Any] = {}
        if prompt is not None and self._details.has_token_ids:
            fields["prompt_token_ids"] = list(prompt.token_ids)
        num_top = self._details.num_top_prompt_logprobs
        if prompt is not None and num_top is not None:
            fields["prompt_logprobs"] = [_prompt_entry(each, num_top) for each in prompt.tokens()]
        return fields

    def _ids(self, deltas: Sequence[SampleDelta]) -> dict[str, Any]:
        """The ids of the sampled tokens, where requested."""
        if not self._details.has_token_ids:
            return {}
        return {"token_ids": [token_id for delta in deltas for token_id in delta.sampled_ids]}


class ChatFormatter(ResponseFormatter):
    """Formats chat answers."""

    _id, _reply, _chunk = "chatcmpl", ChatReply, ChatChunk

    def chunks(self, delta: SampleDelta) -> Iterator[ChatChunk]:
        """The role (once it is known whether a call follows), the text, the finish reason."""
        if delta.prompt is not None:
            self._prompts[delta.index] = delta.prompt
        details = {"logprobs": self._logprobs(delta.logprobs), **self._ids([delta])}
        has_more = bool(delta.logprobs or details.get("token_ids"))
        pieces = delta.shown or ((Words(""),) if has_more else ())
        if delta.index not in self._begun and (pieces or delta.finish_reason is not None):
            self._begun.add(delta.index)
            yield from self._begin(delta.index, pieces)
        for piece in pieces:
            yield self._piece(delta.index, self._delta(delta.index, piece), **details)
            details = {"logprobs": self._logprobs(()), **self._ids(())}
        if delta.finish_reason is not None:
            reason = delta.finish_reason
            yield self._piece(delta.index, MessageDelta(), finish_reason=reason, **self._ids(()))

    def _begin(self, index: int, pieces: Sequence[AnswerPiece]) -> Iterator[ChatChunk]:
        first = self._piece(index, self._first(pieces))
        yield first.model_copy(update=self._of_prompt(self._prompts.pop(index, None)))
        if self._details.echoed:
            yield self._piece(index, MessageDelta(content=self._details.echoed))

    def _first(self, pieces: Sequence[AnswerPiece]) -> MessageDelta:
        """The role, and no content yet; none at all where a call begins the answer."""
        is_call = bool(pieces) and isinstance(pieces[0], CallStart)
        return MessageDelta(role="assistant", content=None if is_call else "")

    def reply(self, samples: Sequence[Sequence[SampleDelta]], usage: UsageReply) -> BaseModel:
        """The whole answer, with the prompt of all samples once."""
        whole = super().reply(samples, usage)
        return whole.model_copy(update=self._of_prompt(samples[0][0].prompt))

    def _choice(self, index: int, deltas: Sequence[SampleDelta]) -> ChatChoice:
        finish = deltas[-1].finish_reason
        assert finish is not None
        echoed = [Words(self._details.echoed)] if self._details.echoed else []
        pieces = (piece for delta in deltas for piece in delta.shown)
        return ChatChoice(
            index=index,
            message=self._message(Answer.of(chain(echoed, pieces))),
            logprobs=self._logprobs([entry for delta in deltas for entry in delta.logprobs]),
            finish_reason=finish,
            **self._ids(deltas),
        )

    def _message(self, answer: Answer) -> AnswerMessage:
        return _message(answer)

    def _delta(self, index: int, piece: AnswerPiece) -> MessageDelta:
        match piece:
            case Words(text):
                return MessageDelta(content=text)
            case Reasoning(text):
                return MessageDelta(reasoning_content=text, reasoning=text)
            case CallStart(name):
                self._num_calls[index] += 1
                call = FunctionReply(name=name, arguments="")
                new: dict[str, Any] = {"id": new_call_id(), "type": "function", "function": call}
            case CallArguments(text):
                new = {"function": FunctionReply(arguments=text)}
        return MessageDelta(tool_calls=[ToolCallDelta(index=self._num_calls[index] - 1, **new)])

    def _piece(self, index: int, delta: MessageDelta, **more: Any) -> ChatChunk:
        fields = {"logprobs": None, "finish_reason": None, **more}
        choice = ChatChunkChoice(index=index, delta=delta, **fields)
        return self._made(ChatChunk, [choice], **self._no_usage)

    def _logprobs(self, entries: Sequence[TokenText]) -> ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        content = [chat_logprob(entry) for entry in self._shown(entries)]
        return ChatLogprobs(content=content, refusal=None)


class CompletionFormatter(ResponseFormatter):
    """Formats text completions."""

    _id, _reply, _chunk = "cmpl", CompletionReply, CompletionReply

    def chunks(self, delta: SampleDelta) -> Iterator[Chunk]:
        """The event for one delta, if it has content."""
        has_ids = self._details.has_token_ids and bool(delta.prompt or delta.sampled_ids)
        has_more = delta.text or delta.logprobs or has_ids or delta.has_echo
        if has_more or delta.finish_reason is not None:
            choice = self._choice(delta.index, [delta])
            yield self._made(CompletionReply, [choice], **self._no_usage)

    def _choice(self, index: int, deltas: Sequence[SampleDelta]) -> CompletionChoice:
        prompt = deltas[0].prompt
        text, tokens = prompt.echo() if prompt and prompt.echo else ("", ())
        entries = chain(tokens, *(delta.logprobs for delta in deltas))
        choice = CompletionChoice(
            index=index,
            text=text + "".join(delta.text for delta in deltas),
            logprobs=self._logprobs(index, entries) if self._has_logprobs else None,
            finish_reason=deltas[-1].finish_reason,
            **self._ids(deltas),
        )
        return choice.model_copy(update=self._of_prompt(prompt))

    def _logprobs(self, index: int, given: Iterable[TokenText]) -> CompletionLogprobs:
        """The first token of a prompt has no log-probability.

        The lists are not validated, which would hold the interpreter for long.
        """
        found = CompletionLogprobs.model_construct(
            tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[]
        )
        for entry in self._shown(given):
            logprob, top = None, None
            if entry.logprob is not None:
                logprob = finite_logprob(entry.logprob)
                alternatives = {
                    each.text: finite_logprob(each.logprob or 0.0) for each in entry.top
                }
                top = (
                    {entry.text: logprob} | alternatives | {entry.text: logprob}
                )  # its own is first
            found.tokens.append(entry.text)
            found.token_logprobs.append(logprob)
            found.top_logprobs.append(top)
            found.text_offset.append(self._offsets[index].next(entry.shown))
        return found


def _message(answer: Answer) -> AnswerMessage:
    """A whole answer; an answer of calls only has no content."""
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


def _prompt_entry(token: TokenText, num_top: int) -> dict[str, PromptLogprob] | None:
    """A token of a prompt and its likeliest alternatives."""
    if token.logprob is None:
        return None
    top = token.top[:num_top]
    ranks = {each.token_id: rank for rank, each in enumerate(token.top, start=1)}
    return {
        str(each.token_id): PromptLogprob(
            logprob=finite_logprob(each.logprob or 0.0),
            rank=ranks.get(each.token_id),
            decoded_token=each.text,
        )
        for each in (token, *top)
    }


def _fingerprint(model: TextModel) -> str:
    """An id that changes with the weights or the version of this program."""
    identity = f"{version('triptych')} {model.name} {model.digest}"
    return f"fp_{hashlib.sha256(identity.encode()).hexdigest()[:10]}"
