"""The answers of Ollama's API: a line for each piece, or one document.

Owns their fields, how text deltas become lines, and the reported times. A field is sent if it was
set. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel

from triptych.modalities.llm.api.generation import Generation
from triptych.modalities.llm.api.ollama.dialect import nanoseconds, now_text
from triptych.modalities.llm.api.replies import (
    ChatLogprob,
    UsageReply,
    chat_logprob,
    new_call_id,
)
from triptych.modalities.llm.api.samples import SampleDelta
from triptych.modalities.llm.api.tools.pieces import CallArguments, CallStart, Reasoning, Words
from triptych.modalities.llm.api.translation import parse_arguments

DoneReason = Literal["stop", "length", "load", "unload"]


class OllamaFunctionReply(BaseModel):
    """A tool and the arguments of a call."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCallReply(BaseModel):
    """A complete call of a tool."""

    id: str
    function: OllamaFunctionReply


class OllamaMessageReply(BaseModel):
    """A piece of an answer, or all of it."""

    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[OllamaCallReply] = []


class Durations(BaseModel):
    """The durations of a request in nanoseconds, and its token counts.

    The prompt's time lasts until the first token and includes waiting.
    """

    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class AnswerLine(Durations):
    """The common fields of the lines of chat and generate; the last is `done` and has the times."""

    model: str
    created_at: str
    done: bool
    done_reason: DoneReason | None = None
    logprobs: list[ChatLogprob] | None = None


class ChatLine(AnswerLine):
    """Answer of `/api/chat`, or a line of it."""

    message: OllamaMessageReply


class GenerateLine(AnswerLine):
    """Answer of `/api/generate`, or a line of it."""

    response: str
    thinking: str = ""
    context: list[int] | None = None


class Timing:
    """When a request arrived, was begun, and had its first token."""

    def __init__(self, arrived_s: float, load_s: float) -> None:
        self._arrived_s = arrived_s
        self._load_s = load_s
        self._begun_s = time.monotonic()
        self._first_s = 0.0

    def tick(self) -> None:
        """Record the time of a token."""
        self._first_s = self._first_s or time.monotonic()

    def durations(self, usage: UsageReply) -> dict[str, int]:
        """The fields of `Durations`, at the end."""
        now_s = time.monotonic()
        return {
            "total_duration": nanoseconds(now_s - self._arrived_s),
            "load_duration": nanoseconds(self._load_s),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(self._first_s - self._begun_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(now_s - self._first_s),
        }


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer."""

    text: str = ""
    thinking: str = ""
    calls: tuple[OllamaCallReply, ...] = ()
    logprobs: tuple[ChatLogprob, ...] = ()

    @classmethod
    def join(cls, pieces: Sequence[AnswerPart]) -> AnswerPart:
        """One part of all `pieces`."""
        return cls(
            text="".join(piece.text for piece in pieces),
            thinking="".join(piece.thinking for piece in pieces),
            calls=tuple(call for piece in pieces for call in piece.calls),
            logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
        )


class OllamaFormatter(ABC):
    """Formats the deltas of one answer. `model` is the client's name of the model.

    `context` are the prompt's tokens, if the client gets all tokens for a continuation.
    """

    def __init__(
        self,
        model: str,
        timing: Timing,
        *,
        shows_reasoning: bool = True,
        context: Sequence[int] | None = None,
    ) -> None:
        self._model = model
        self._context = None if context is None else list(context)
        self._shows_reasoning = shows_reasoning
        self._timing = timing
        self._call: tuple[str, list[str]] | None = None
        self._num_calls = 0

    @abstractmethod
    def _line(self, part: AnswerPart, **more: Any) -> BaseModel:
        """A line; `more` are fields of its end."""

    def empty(self, reason: DoneReason) -> BaseModel:
        """The answer to a request that only loads or unloads the model."""
        return self._line(AnswerPart(), done=True, done_reason=reason)

    async def lines(self, generation: Generation) -> AsyncGenerator[BaseModel, None]:
        """The lines of an answer while it is generated."""
        async with aclosing(self._pieces(generation)) as pieces:
            async for part, end in pieces:
                yield self._line(part, **(end or {"done": False}))

    async def whole(self, generation: Generation) -> BaseModel:
        """The answer in one document."""
        found: list[AnswerPart] = []
        end: dict[str, Any] = {}
        async for part, fields in self._pieces(generation):
            found.append(part)
            end = fields or end
        return self._line(AnswerPart.join(found), **end)

    async def _pieces(
        self, generation: Generation
    ) -> AsyncGenerator[tuple[AnswerPart, dict[str, Any] | None], None]:
        """The parts of an answer; the last one comes with the fields of the end."""
        async with aclosing(generation.deltas) as deltas:
            async for delta in deltas:
                self._timing.tick()
                if self._context is not None:
                    self._context += delta.sampled_ids
                logprobs = tuple(map(chat_logprob, delta.logprobs or ()))
                for part in self._parts(delta):
                    yield replace(part, logprobs=logprobs), None
                    logprobs = ()
                if logprobs:
                    yield AnswerPart(logprobs=logprobs), None
                if delta.finish_reason is not None:
                    reason = "length" if delta.finish_reason == "length" else "stop"
                    end = {"done": True, "done_reason": reason}
                    if self._context is not None:
                        end["context"] = self._context
                    durations = self._timing.durations(generation.usage.total())
                    yield AnswerPart(), {**end, **durations}

    def _parts(self, delta: SampleDelta) -> Iterator[AnswerPart]:
        for piece in delta.shown:
            if isinstance(piece, CallArguments):
                assert self._call is not None
                self._call[1].append(piece.text)
                continue
            yield from self._end_call()
            match piece:
                case Words(text):
                    yield AnswerPart(text=text)
                case Reasoning(text) if self._shows_reasoning:
                    yield AnswerPart(thinking=text)
                case CallStart(name):
                    self._call = (name, [])
        if delta.finish_reason is not None:
            yield from self._end_call()

    def _end_call(self) -> Iterator[AnswerPart]:
        """The call that has ended, if any, with the arguments written so far."""
        if self._call is None:
            return
        (name, texts), self._call = self._call, None
        arguments = parse_arguments("".join(texts))
        function = OllamaFunctionReply(index=self._num_calls, name=name, arguments=arguments)
        self._num_calls += 1
        yield AnswerPart(calls=(OllamaCallReply(id=new_call_id(), function=function),))

    def _head(self, part: AnswerPart) -> dict[str, Any]:
        """The first fields of lines of both kinds."""
        logprobs = {"logprobs": list(part.logprobs)} if part.logprobs else {}
        return {"model": self._model, "created_at": now_text(), **logprobs}


class ChatLines(OllamaFormatter):
    """Answers of `/api/chat`."""

    def _line(self, part: AnswerPart, **more: Any) -> ChatLine:
        message: dict[str, Any] = {"role": "assistant", "content": part.text}
        if part.thinking:
            message["thinking"] = part.thinking
        if part.calls:
            message["tool_calls"] = list(part.calls)
        return ChatLine(**self._head(part), message=OllamaMessageReply(**message), **more)


class GenerateLines(OllamaFormatter):
    """Answers of `/api/generate`."""

    def _line(self, part: AnswerPart, **more: Any) -> GenerateLine:
        thinking: dict[str, Any] = {"thinking": part.thinking} if part.thinking else {}
        return GenerateLine(**self._head(part), response=part.text, **thinking, **more)
