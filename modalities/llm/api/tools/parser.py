"""Parses an answer as it arrives into reasoning, words and calls.

Owns the order of the parts, and the white space between them, which belongs to none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from triptych.modalities.llm.api.tools.pieces import (
    AnswerPiece,
    ReadCalls,
    Reading,
    Reasoning,
    ToolSchemas,
    Words,
)
from triptych.modalities.llm.api.tools.source import TextSource


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The marks around a family's reasoning."""

    open: str
    close: str


def words_alone(source: TextSource, tools: ToolSchemas) -> Reading:
    """Read an answer without calls."""
    yield from source.until((), Words)


class AnswerParser:
    """Takes the text of one answer and returns its pieces.

    With `is_reasoning` the prompt has already opened the reasoning. An answer that `is_forced`
    consists of calls: other text is the beginning of a call that was cut off, and is not shown.
    However the text is cut, the joined pieces are the same.
    """

    def __init__(
        self,
        reasoning: ReasoningMarks | None = None,
        read_calls: ReadCalls = words_alone,
        tools: ToolSchemas | None = None,
        *,
        is_reasoning: bool = False,
        is_forced: bool = False,
    ) -> None:
        self._is_forced = is_forced
        self._source = TextSource()
        self._reading = _read_answer(self._source, reasoning, read_calls, tools or {}, is_reasoning)
        self._kind: type[AnswerPiece] | None = None
        self._has_reasoning = False
        self._held = ""  # white space that is shown only if more of its kind follows

    @property
    def is_in_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self._source.is_reasoning

    def push(self, text: str) -> list[AnswerPiece]:
        """The pieces of further text."""
        self._source.text += text
        return list(self._found())

    def finish(self) -> list[AnswerPiece]:
        """The remaining pieces at the end of the answer."""
        self._source.is_over = True
        found = list(self._found())
        if (
            self._kind is Words and self._held
        ):  # white space at the end of a plain answer is part of it
            found.append(Words(self._held))
        return found

    def _found(self) -> Iterator[AnswerPiece]:
        for piece in self._reading:
            if piece is None:
                return
            if self._is_forced and isinstance(piece, Words):
                continue
            if isinstance(piece, Words | Reasoning):
                yield from self._trim(piece)
            else:
                self._held = ""
                self._kind = type(piece)
                yield piece

    def _trim(self, piece: Words | Reasoning) -> Iterator[AnswerPiece]:
        """The piece without white space at the edges of its part, except at the answer's edges."""
        kind, text = type(piece), piece.text
        self._has_reasoning = self._has_reasoning or kind is Reasoning
        is_new = self._kind is not kind
        if is_new:
            self._held = ""
            if self._kind is not None or self._has_reasoning:
                text = text.lstrip()
                if not text:
                    return
            self._kind = kind
        shown = text.rstrip()
        if shown:
            yield kind(self._held + shown)
            self._held = ""
        self._held += text[len(shown) :]


def _read_answer(
    source: TextSource,
    reasoning: ReasoningMarks | None,
    read_calls: ReadCalls,
    tools: ToolSchemas,
    is_reasoning: bool,
) -> Reading:
    if reasoning is not None:
        if not is_reasoning:
            spaces = yield from source.spaces()
            is_reasoning = yield from source.begins(reasoning.open)
            source.text = source.text if is_reasoning else spaces + source.text
        if is_reasoning:
            yield Reasoning("")  # empty reasoning also separates white space
            yield from source.reasoning((reasoning.close,), Reasoning)
    yield from read_calls(source, tools)
