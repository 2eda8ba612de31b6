"""Mends frequent faults in the JSON of a call while it is being written.

Owns the rules, each of which leaves valid JSON as it is: control characters in a string are
escaped; a quotation mark ends a value only where the value may end; `True`, `False` and `None`
become JSON's words; a comma before a closing bracket is dropped; an unpaired surrogate becomes the
replacement character. Builds no values.
"""

from __future__ import annotations

import json
import re

from triptych.modalities.llm.api.tools.json_scanner import JsonScanner

_WORDS = {"True": "true", "False": "false", "None": "null"}
_SPACES = " \t\n\r"
_AFTER_KEY, _AFTER_VALUE = ":", ",}]"
_FIRST_HALF = re.compile(r"\\u[dD][89abAB]..")
_SECOND_HALF = re.compile(r"\\u[dD][c-fC-F]..")
_MISSING = r"\ufffd"


class JsonMender:
    """Takes one value character by character, and returns valid JSON.

    Text that depends on the next characters is held back until they arrive. `is_done` once the
    value is complete.
    """

    def __init__(self) -> None:
        self._scanner = JsonScanner()
        self._held = ""  # a quotation mark or a comma, and the white space after it
        self._word = ""  # the beginning of a word of Python's
        self._escape = ""  # the beginning of an escape
        self._first_half = ""  # the escape of a surrogate that wants a second one

    @property
    def is_done(self) -> bool:
        """Whether the value is complete."""
        return self._scanner.is_done

    def push(self, char: str) -> str | None:
        """The mended text of a further character; `None` if these rules cannot mend it."""
        if self._held:
            if char in _SPACES:
                self._held += char
                return ""
            return self._after_held(char)
        if self._scanner.is_in_string:
            return self._in_string(char)
        if self._word or (self._scanner.expects_value and char in "TFN"):
            return self._in_word(char)
        if char == "," and self._scanner.expects_comma:
            self._held = char
            return ""
        return self._pass(char)

    def finish(self) -> str:
        """The text that was held back when the input ended."""
        held, self._held = self._held, ""
        return self._pass(held) or ""

    @classmethod
    def mend(cls, text: str) -> str | None:
        """The mended text of a whole value; `None` if these rules cannot mend it, or too deep."""
        mender = cls()
        pieces = [mender.push(char) for char in text]
        return None if None in pieces else "".join(map(str, pieces)) + mender.finish()

    def _after_held(self, char: str) -> str | None:
        held, self._held = self._held, ""
        if held[0] == ",":
            before = held[1:] if char in "}]" else held
        elif char in (_AFTER_KEY if self._scanner.is_in_key else _AFTER_VALUE):
            before = held
        elif self._scanner.is_in_key:
            return None  # the following text, with its marks, would be taken for a part of the key
        else:
            before = json.dumps(held)[1:-1]
        passed = self._pass(before)
        rest = None if passed is None else self.push(char)
        return None if rest is None else f"{passed}{rest}"

    def _in_string(self, char: str) -> str | None:
        if char == "\\" or self._scanner.is_in_escape:
            return self._in_escape(char)
        before = self._with_half("")
        if char == '"':
            self._held = char
            return before
        passed = self._pass(json.dumps(char)[1:-1] if char < " " else char)
        return None if passed is None else before + passed

    def _in_escape(self, char: str) -> str | None:
        if self._pass(char) is None:
            return None
        self._escape += char
        if self._scanner.is_in_escape:
            return ""
        escape, self._escape = self._escape, ""
        return self._with_half(escape)

    def _with_half(self, text: str) -> str:
        """A complete escape, or nothing, after the half that was held back before it."""
        first, self._first_half = self._first_half, ""
        if first and _SECOND_HALF.fullmatch(text):
            return first + text
        before = _MISSING if first else ""
        if _FIRST_HALF.fullmatch(text):
            self._first_half = text
            return before
        return before + (_MISSING if _SECOND_HALF.fullmatch(text) else text)

    def _in_word(self, char: str) -> str | None:
        self._word += char
        if self._word in _WORDS:
            word, self._word = _WORDS[self._word], ""
            return self._pass(word)
        return "" if any(word.startswith(self._word) for word in _WORDS) else None

    def _pass(self, text: str) -> str | None:
        return text if all(map(self._scanner.push, text)) else None
