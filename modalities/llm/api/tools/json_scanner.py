"""The grammar of JSON (RFC 8259), one character at a time.

Owns which character may follow in a value that is still being written. Builds no values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

MAX_DEPTH = 64
"""Nesting beyond which a value counts as broken."""
_SPACES = " \t\n\r"
_ESCAPES = frozenset('"\\/bfnrtu')
_CLOSERS = {"{": "}", "[": "]"}
_DIGITS = "0123456789"
_NUMBERS: Final[Mapping[str, Mapping[str, str]]] = {
    "": {"-": "-", "0": "0", _DIGITS[1:]: "1"},
    "-": {"0": "0", _DIGITS[1:]: "1"},
    "0": {".": "1.", "eE": "1e"},
    "1": {_DIGITS: "1", ".": "1.", "eE": "1e"},
    "1.": {_DIGITS: "1.0"},
    "1.0": {_DIGITS: "1.0", "eE": "1e"},
    "1e": {"+-": "1e+", _DIGITS: "1e0"},
    "1e+": {_DIGITS: "1e0"},
    "1e0": {_DIGITS: "1e0"},
}
"""The next state of a number by character; a state is named by one example."""
_WORDS: Final = ("true", "false", "null")


def _scalars() -> Iterator[tuple[tuple[str, str], str]]:
    for before, ways in _NUMBERS.items():
        yield from (((before, char), after) for chars, after in ways.items() for char in chars)
    for word in _WORDS:
        yield from (((word[:end], char), word[: end + 1]) for end, char in enumerate(word))


_SCALARS: Final[Mapping[tuple[str, str], str]] = dict(_scalars())
_WHOLE_SCALARS: Final = frozenset({*_WORDS, "0", "1", "1.0", "1e0"})


class JsonScanner:
    """Checks each character for whether it can continue a valid JSON value.

    `is_done` once the value is complete; a number at the top level ends with the next character.
    """

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._expects: str = "value"
        self._scalar = ""  # a word, or what a number goes on as, that may not be complete
        self._string = ""  # "", "open", "escape" or as many as are missing of four hex digits
        self._is_key = False
        self.is_done = False

    @property
    def is_in_string(self) -> bool:
        """Whether the next character belongs to a string, or ends it."""
        return bool(self._string)

    @property
    def is_in_escape(self) -> bool:
        """Whether the next character belongs to an escape in a string."""
        return self._string not in ("", "open")

    @property
    def is_in_key(self) -> bool:
        """Whether the current string is a key."""
        return self._is_key

    @property
    def expects_value(self) -> bool:
        """Whether a value may begin here."""
        return not self._string and not self._scalar and self._expects in ("value", "first")

    @property
    def expects_comma(self) -> bool:
        """Whether a comma may come here, which may also end a number."""
        return bool(self._closers) and (self._expects == "next" or bool(self._scalar))

    def push(self, char: str) -> bool:
        """Add a character; false if it cannot come here."""
        if self._string:
            return self._in_string(char)
        if self._scalar:
            if longer := _SCALARS.get((self._scalar, char)):
                self._scalar = longer
                return True
            if not self._end_scalar():
                return False
        return char in _SPACES or (not self.is_done and self._token(char))

    def finish(self) -> bool:
        """End the text; returns whether the value is complete."""
        return self._end_scalar() and self.is_done

    def _token(self, char: str) -> bool:
        expects = self._expects
        if self._closers and char == self._closers[-1] and expects in ("first", "key", "next"):
            self._closers.pop()
            self._end_value()
            return True
        if expects == "next":
            self._expects = "more-key" if self._closers[-1] == "}" else "value"
            return char == ","
        if expects == "colon":
            self._expects = "value"
            return char == ":"
        if expects in ("key", "more-key"):
            self._string, self._is_key = "open", True
            return char == '"'
        return self._begin_value(char)

    def _begin_value(self, char: str) -> bool:
        if char == '"':
            self._string, self._is_key = "open", False
        elif char in _CLOSERS:
            self._closers.append(_CLOSERS[char])
            self._expects = "key" if char == "{" else "first"
            return len(self._closers) <= MAX_DEPTH
        else:
            self._scalar = _SCALARS.get(("", char), "")
            return bool(self._scalar)
        return True

    def _in_string(self, char: str) -> bool:
        if self._string == "open":
            if char == "\\":
                self._string = "escape"
            elif char == '"':
                self._string = ""
                if self._is_key:
                    self._expects = "colon"
                else:
                    self._end_value()
            return char >= " "
        if self._string == "escape":
            self._string = "4" if char == "u" else "open"
            return char in _ESCAPES
        self._string = str(int(self._string) - 1) if self._string != "1" else "open"
        return char in "0123456789abcdefABCDEF"

    def _end_scalar(self) -> bool:
        scalar, self._scalar = self._scalar, ""
        if scalar:
            self._end_value()
        return not scalar or scalar in _WHOLE_SCALARS

    def _end_value(self) -> None:
        self._expects = "next"
        self.is_done = not self._closers
