"""The pieces of an answer: words, reasoning and calls, as they arrive.

Owns their types. Knows no format.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from triptych.modalities.llm.api.tools.source import TextSource


@dataclass(frozen=True, slots=True)
class Words:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a call; the `CallArguments` that follow belong to it."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the latest call's arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A complete call of a tool; its `arguments` are JSON text."""

    name: str
    arguments: str


AnswerPiece: TypeAlias = Words | Reasoning | CallStart | CallArguments
ToolSchemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the parameters of the tools that may be called, by name."""
Reading: TypeAlias = Generator[AnswerPiece | None, None, None]
ReadCalls: TypeAlias = Callable[[TextSource, ToolSchemas], Reading]
"""Reads an answer with calls in one family's format; a malformed call is text."""


@dataclass(slots=True)
class Answer:
    """An answer, its pieces joined."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolUse] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[AnswerPiece]) -> Answer:
        """The answer with these pieces."""
        answer = cls()
        for piece in pieces:
            match piece:
                case Words(text):
                    answer.text += text
                case Reasoning(text):
                    answer.reasoning += text
                case CallStart(name):
                    answer.calls.append(ToolUse(name, ""))
                case CallArguments(text):
                    last = answer.calls[-1]
                    answer.calls[-1] = ToolUse(last.name, last.arguments + text)
        return answer
