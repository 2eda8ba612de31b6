"""Text that arrives in pieces, as parsers read it.

Owns what has arrived and is not read yet. A parser is a generator: it yields what it has found,
and `None` where it needs more text. However the text is cut, it finds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from triptych.modalities.llm.api.detokenizer import overlap

FoundT = TypeVar("FoundT")


@dataclass(slots=True)
class TextSource:
    """Unread `text`; when it `is_over`, no more comes. `taken` was read since it was last reset.

    What is read now `is_reasoning` until a mark ends it.
    """

    text: str = ""
    is_over: bool = False
    taken: str = ""
    is_reasoning: bool = False

    def take(self, length: int) -> str:
        """Read the next characters, which are there."""
        text, self.text = self.text[:length], self.text[length:]
        self.taken += text
        return text

    def put_back(self, text: str) -> None:
        """Make `text`, which was read last, unread again."""
        self.text = text + self.text
        self.taken = self.taken.removesuffix(text)

    def next(self) -> Generator[None, None, str]:
        """The next character, unread; nothing where the text is over."""
        while not self.text and not self.is_over:
            yield None
        return self.text[:1]

    def until(
        self, ends: Sequence[str], found: Callable[[str], FoundT]
    ) -> Generator[FoundT | None, None, str]:
        """Yield the text before the first of `ends`, as soon as it cannot belong to one.

        Returns the end that was met and read, or nothing where the text is over.
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
        """As `until`, of text of reasoning."""
        self.is_reasoning = True
        end = yield from self.until(ends, found)
        self.is_reasoning = False
        return end

    def before(self, ends: Sequence[str]) -> Generator[None, None, tuple[str, str]]:
        """The whole text before the first of `ends`, and that end, which is read, too."""
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
        """Drop the text before the first of `ends`, as it comes; that end stays unread."""
        while True:
            place, end = self._first(ends)
            self.take(place)
            self.taken = ""
            if end or self.is_over:
                return
            yield None

    def begins(self, text: str) -> Generator[None, None, bool]:
        """Whether `text` is next; if so it is read."""
        while len(self.text) < len(text) and not self.is_over and text.startswith(self.text):
            yield None
        if self.text.startswith(text):
            self.take(len(text))
            return True
        return False

    def spaces(self) -> Generator[None, None, str]:
        """Read white space up to something else."""
        spaces = ""
        while True:
            spaces += self.take(len(self.text) - len(self.text.lstrip()))
            if self.text or self.is_over:
                return spaces
            yield None

    def any_of(self, texts: Sequence[str]) -> Generator[None, None, str]:
        """Which of some texts is next, which is read then; nothing if none is."""
        for text in texts:
            if (yield from self.begins(text)):
                return text
        return ""

    def closing(self, ends: Sequence[str]) -> Generator[None, None, str]:
        """As `any_of`; an end with which the text breaks off is read, too."""
        end = yield from self.any_of(ends)
        if not end and self.is_over and any(each.startswith(self.text) for each in ends):
            self.take(len(self.text))
        return end

    def _first(self, ends: Sequence[str]) -> tuple[int, str]:
        """Where the first of `ends` is; without one, how far the text surely goes before any."""
        places = [(self.text.find(end), -len(end), end) for end in ends]
        if there := [each for each in places if each[0] >= 0]:
            place, _, end = min(there)
            return place, end
        if self.is_over:
            return len(self.text), ""
        held = max((overlap(self.text, end) for end in ends), default=0)
        return len(self.text) - held, ""
