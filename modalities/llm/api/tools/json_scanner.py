"""The grammar of JSON (RFC 8259), one character after the other.

Owns what may follow what in a value that is still being written. Builds no values.
"""

from __future__ import annotations

import re

MAX_DEPTH = 64
"""Nesting beyond which a value counts as broken."""
_SPACES = " \t\n\r"
_ESCAPES = frozenset('"\\/bfnrtu')
_CLOSERS = {"{": "}", "[": "]"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_NUMBER_START = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:\.\d*)?(?:(?<=\d)[eE][+-]?\d*)?)?")
_WORDS = ("true", "false", "null")


class JsonScanner:
    """Says of each character whether it can go on a valid JSON value.

    `is_done` once the value is complete; a number at the top ends with what follows it.
    """

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._expects: str = "value"
        self._scalar = ""  # a number or a word that may not be complete
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
        """Whether the string that is being read is a key."""
        return self._is_key

    @property
    def expects_value(self) -> bool:
        """Whether a value may begin here."""
        return not self._string and not self._scalar and self._expects in ("value", "first")

    @property
    def expects_comma(self) -> bool:
        """Whether a comma may come here, which ends a number, too."""
        return bool(self._closers) and (self._expects == "next" or bool(self._scalar))

    def push(self, char: str) -> bool:
        """Take a character in; false where it cannot come here."""
        if self._string:
            return self._in_string(char)
        if self._scalar:
            if self._goes_on(self._scalar + char):
                self._scalar += char
                return True
            if not self._end_scalar():
                return False
        return char in _SPACES or (not self.is_done and self._token(char))

    def finish(self) -> bool:
        """The text is over; whether the value is complete."""
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
            self._scalar = char
            return self._goes_on(char)
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

    def _goes_on(self, scalar: str) -> bool:
        """Whether a number or a word can begin so."""
        if any(word.startswith(scalar) for word in _WORDS):
            return True
        return bool(_NUMBER_START.fullmatch(scalar))

    def _end_scalar(self) -> bool:
        scalar, self._scalar = self._scalar, ""
        if scalar:
            self._end_value()
        return not scalar or scalar in _WORDS or bool(_NUMBER.fullmatch(scalar))

    def _end_value(self) -> None:
        self._expects = "next"
        self.is_done = not self._closers
