"""Text that arrives in pieces, as parsers read it.

Owns the text that has arrived and is not read yet. A parser is a generator: it yields the pieces it
finds, and `None` where it needs more text. The result does not depend on how the text is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from triptych.modalities.llm.api.detokenizer import overlap

FoundT = TypeVar("FoundT")


@dataclass(slots=True)
class TextSource:
    """Unread `text`, the last of it if `is_over`. `taken` is the text read since its last reset.

    `is_reasoning` while the text being read is reasoning, until a mark ends it.
    """

    text: str = ""
    is_over: bool = False
    taken: str = ""
    is_reasoning: bool = False

    def take(self, length: int) -> str:
        """Read the next characters, which must have arrived."""
        text, self.text = self.text[:length], self.text[length:]
        self.taken += text
        return text

    def put_back(self, text: str) -> None:
        """Make `text`, which was read last, unread."""
        self.text = text + self.text
        self.taken = self.taken.removesuffix(text)

    def next(self) -> Generator[None, None, str]:
        """The next character, which stays unread; empty at the end of the text."""
        while not self.text and not self.is_over:
            yield None
        return self.text[:1]

    def until(
        self, ends: Sequence[str], found: Callable[[str], FoundT]
    ) -> Generator[FoundT | None, None, str]:
        """Yield the text before the first of `ends`, as soon as it cannot belong to one.

        Returns the end that was read; empty at the end of the text.
        """
        while True:
            place, end = self._first(ends)
            if text := self.take(place):
                yield found(text)
            if end or self.is_over:
                self.take(len(end))
                return end
            yield None

    def reasoning(
        self, ends: Sequence[str], found: Callable[[str], FoundT]
    ) -> Generator[FoundT | None, None, str]:
        """Read reasoning as `until` reads text."""
        self.is_reasoning = True
        end = yield from self.until(ends, found)
        self.is_reasoning = False
        return end

    def before(self, ends: Sequence[str]) -> Generator[None, None, tuple[str, str]]:
        """Read the text up to the first of `ends`; return both."""
        while True:
            place, end = self._first(ends)
            if end:
                text = self.take(place)
                self.take(len(end))
                return text, end
            if self.is_over:
                return self.take(len(self.text)), ""
            yield None

    def skip(self, ends: Sequence[str]) -> Generator[None, None, None]:
        """Drop the text before the first of `ends` as it arrives; the end stays unread."""
        while True:
            place, end = self._first(ends)
            self.take(place)
            self.taken = ""
            if end or self.is_over:
                return
            yield None

    def begins(self, text: str) -> Generator[None, None, bool]:
        """Whether `text` is next; reads it if so."""
        while len(self.text) < len(text) and not self.is_over and text.startswith(self.text):
            yield None
        if self.text.startswith(text):
            self.take(len(text))
            return True
        return False

    def spaces(self) -> Generator[None, None, str]:
        """Read white space up to another character."""
        spaces = ""
        while True:
            spaces += self.take(len(self.text) - len(self.text.lstrip()))
            if self.text or self.is_over:
                return spaces
            yield None

    def any_of(self, texts: Sequence[str]) -> Generator[None, None, str]:
        """Read the one of `texts` that is next; empty if none is."""
        for text in texts:
            if (yield from self.begins(text)):
                return text
        return ""

    def closing(self, ends: Sequence[str]) -> Generator[None, None, str]:
        """Read as `any_of` does, or an incomplete end at the end of the text."""
        end = yield from self.any_of(ends)
        if not end and self.is_over and any(each.startswith(self.text) for each in ends):
            self.take(len(self.text))
        return end

    def _first(self, ends: Sequence[str]) -> tuple[int, str]:
        """The position of the first of `ends`; without one, where the first may still begin."""
        places = [(self.text.find(end), -len(end), end) for end in ends]
        if there := [each for each in places if each[0] >= 0]:
            place, _, end = min(there)
            return place, end
        if self.is_over:
            return len(self.text), ""
        held = max((overlap(self.text, end) for end in ends), default=0)
        return len(self.text) - held, ""
