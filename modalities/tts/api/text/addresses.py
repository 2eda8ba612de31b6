"""Rules for phone numbers, web and mail addresses, files and versions.

Owns how such strings are spelled out. They are read completely, except for the scheme of an
address.
"""

from __future__ import annotations

import re

from triptych.modalities.tts.api.text.language import alternatives
from triptych.modalities.tts.api.text.numbers import digits
from triptych.modalities.tts.api.text.rules import ReadingStyle, RuleGroup, reads

_PART = re.compile(r"[^\W\d_]+|\d{1,40}|[^\w]|_")
_SYLLABLE = re.compile(r"[^aeiou][aeiou]\Z")
_CAMEL = re.compile(r"[A-Z]{2,}(?![a-z])|[A-Z]?[a-z]+|[A-Z]|\d{1,40}|[^\W\d_]+")


class AddressRules(RuleGroup):
    """The rules for addresses and for numbers that are identifiers."""

    def __init__(self, style: ReadingStyle) -> None:
        words = style.language.words
        super().__init__(
            style,
            tlds=alternatives(words.tlds),
            extensions=alternatives(words.extensions),
            tail=r"[^\s<>\"()]{0,2048}(?<![.,;:!?'*_~…])",
        )

    @reads(r"(?i:https?|ftp)://{tail}", "letter")
    def _link(self, match: re.Match[str]) -> str | None:
        return self._spell(match[0].partition("://")[2])

    @reads(r"\d{1,3}(?:\.\d{1,3}){3}(?![\w.]\w)(?::\d{1,5})?", "digit")
    def _host(self, match: re.Match[str]) -> str:
        address, colon, port = match[0].partition(":")
        spoken = " dot ".join(map(digits, address.split(".")))
        return spoken + (f" colon {digits(port)}" if colon else "")

    @reads(
        r"(?<![\w.-])(?:1[ .-])?(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4}(?![\w-])"
        r"|(?<![\w.-])\d{3}-\d{4}(?![\w-])"
        r"|(?<![\w.-])\d{3}-\d{2}-\d{4}(?![\w-])"
        r"|(?<![\w.-])\d{4}(?:[ -]\d{4}){3}(?![\w-])",
        "digit",
    )
    @reads(r"\+\d{1,3}(?:[ .-]?(?:\(\d{1,5}\)|\d{1,5})){1,6}(?![\w-])", "sign")
    @reads(r"\(\d{3}\) ?\d{3}[ .-]\d{4}(?![\w-])", "sign")
    def _phone(self, match: re.Match[str]) -> str:
        plus = "plus " if match[0].startswith("+") else ""
        return plus + ", ".join(map(digits, re.findall(r"\d+", match[0])))

    @reads(r"(?<![\w.-])0[1-9]\d{0,3}(?:[ -]\d{2,8}){1,5}(?![\w-])", "digit")
    def _national_phone(self, match: re.Match[str]) -> str | None:
        num_digits = sum(map(str.isdecimal, match[0]))
        return self._phone(match) if 9 <= num_digits <= 12 else None

    @reads(r"(?:\d{2,5}(?:[ -]\d{2,5}){1,5}|\d{7,15}|\d{3})(?![\w-])", "digit")
    def _cued_phone(self, match: re.Match[str]) -> str | None:
        before = match.string[max(0, match.start() - 14) : match.start()].rstrip(" :.")
        has_cue = before.rpartition(" ")[2].lower() in self._lang.words.phone_cues
        return self._phone(match) if has_cue else None

    @reads(r"\d{1,6}(?:\.\d{1,6}){2,5}(?![\w.]\w)", "digit")
    def _version(self, match: re.Match[str]) -> str:
        return " point ".join(map(self._say.number, match[0].split(".")))

    @reads(r"(?<!\w)(?i:www)\.(?=\w){tail}", "letter")
    @reads(
        r"(?<![\w@])[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}(?<!-)",
        *("digit", "letter"),
    )
    @reads(
        r"(?<![\w@.])(?:[A-Za-z0-9-]{1,63}\.){1,8}{tlds}(?![\w@-]|\.\w)(?:[/:?#](?=\w){tail}|/)?",
        *("digit", "letter"),
    )
    @reads(r"(?<![\w@])[\w-]{1,80}\.{extensions}{end}", "digit", "letter")
    def _speak(self, match: re.Match[str]) -> str | None:
        return self._spell(match[0])

    @reads(r"(?<![\w&])#(?=\d)", "sign")
    def _number_sign(self, match: re.Match[str]) -> str:
        return "number"

    @reads(r"(?<![\w&])#([^\W\d_]\w{0,99})", "sign")
    def _hashtag(self, match: re.Match[str]) -> str:
        return f"hashtag {self._identifier(match[1])}"

    @reads(r"(?<![\w.])@([^\W\d_]\w{0,49})", "sign")
    def _handle(self, match: re.Match[str]) -> str:
        return f"at {self._identifier(match[1])}"

    def _spell(self, address: str) -> str | None:
        spoken = [self._part(part) for part in _PART.findall(address.rstrip("/"))]
        return " ".join(filter(None, spoken)) or None

    def _part(self, part: str) -> str:
        if part.isdecimal():
            return self._say.code(part) if len(part) <= 4 else digits(part)
        if not part.isalpha():
            return self._lang.address_signs.get(part, "")
        part = part.lower()
        is_word = re.search(r"[aeiouy]|[^\x00-\x7f]", part) and (
            len(part) > 2 or _SYLLABLE.match(part)
        )
        return part if is_word else " ".join(part)

    def _identifier(self, name: str) -> str:
        """The words of camelCase or snake_case in lower case; digits as a code."""
        return " ".join(map(self._piece, _CAMEL.findall(name)))

    def _piece(self, part: str) -> str:
        if part.isdecimal():
            return self._say.code(part)
        return " ".join(part) if part.isupper() and len(part) < 4 else part.lower()
