"""What is dialled, clicked or addressed: phone numbers, web and mail addresses, files, versions.

Owns how such strings are spelled out. They are read whole: nothing of an address is left out but
its scheme.
"""

from __future__ import annotations

import re

from triptych.modalities.tts.api.text.language import alternatives
from triptych.modalities.tts.api.text.numbers import digits
from triptych.modalities.tts.api.text.rules import WORD_END, ReadingRules, Rule, RuleSet

_TAIL = r"[^\s<>\"()]{0,2048}(?<![.,;:!?'*_~…])"
_PART = re.compile(r"[^\W\d_]+|\d{1,40}|[^\w]|_")
_SYLLABLE = re.compile(r"[^aeiou][aeiou]\Z")
_CAMEL = re.compile(r"[A-Z]{2,}(?![a-z])|[A-Z]?[a-z]+|[A-Z]|\d{1,40}|[^\W\d_]+")


def address_rules(voice: ReadingRules) -> RuleSet:
    """The rules for addresses and numbers that name something."""
    addresses = _Addresses(voice)
    words = voice.language.words
    tlds, extensions = alternatives(words.tlds), alternatives(words.extensions)
    mail = Rule(
        re.compile(
            r"(?<![\w@])[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}(?<!-)"
        ),
        addresses.speak,
    )
    site = Rule(
        re.compile(
            rf"(?<![\w@.])(?:[A-Za-z0-9-]{{1,63}}\.){{1,8}}{tlds}(?![\w@-]|\.\w)(?:[/:?#](?=\w){_TAIL}|/)?"
        ),
        addresses.speak,
    )
    file = Rule(re.compile(rf"(?<![\w@])[\w-]{{1,80}}\.{extensions}{WORD_END}"), addresses.speak)
    return RuleSet(
        digit=(
            Rule(re.compile(r"\d{1,3}(?:\.\d{1,3}){3}(?![\w.]\w)(?::\d{1,5})?"), addresses.host),
            Rule(
                re.compile(
                    r"(?<![\w.-])(?:1[ .-])?(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4}(?![\w-])"
                    r"|(?<![\w.-])\d{3}-\d{4}(?![\w-])"
                    r"|(?<![\w.-])\d{3}-\d{2}-\d{4}(?![\w-])"
                    r"|(?<![\w.-])\d{4}(?:[ -]\d{4}){3}(?![\w-])"
                ),
                addresses.phone,
            ),
            Rule(
                re.compile(r"(?:\d{2,5}(?:[ -]\d{2,5}){1,5}|\d{7,15}|\d{3})(?![\w-])"),
                addresses.cued_phone,
            ),
            Rule(re.compile(r"\d{1,6}(?:\.\d{1,6}){2,5}(?![\w.]\w)"), addresses.version),
            mail,
            site,
            file,
        ),
        letter=(
            Rule(re.compile(rf"(?:https?|ftp)://{_TAIL}", re.IGNORECASE), addresses.link),
            Rule(re.compile(rf"(?<!\w)www\.(?=\w){_TAIL}", re.IGNORECASE), addresses.speak),
            mail,
            site,
            file,
        ),
        sign=(
            Rule(
                re.compile(r"\+\d{1,3}(?:[ .-]?(?:\(\d{1,5}\)|\d{1,5})){1,6}(?![\w-])"),
                addresses.phone,
            ),
            Rule(re.compile(r"\(\d{3}\) ?\d{3}[ .-]\d{4}(?![\w-])"), addresses.phone),
            Rule(re.compile(r"(?<![\w&])#(?=\d)"), lambda match: "number"),
            Rule(re.compile(r"(?<![\w&])#([^\W\d_]\w{0,99})"), addresses.hashtag),
            Rule(re.compile(r"(?<![\w.])@([^\W\d_]\w{0,49})"), addresses.handle),
        ),
    )


class _Addresses:
    def __init__(self, voice: ReadingRules) -> None:
        self._say = voice.numbers
        self._signs = voice.language.address_signs
        self._phone_cues = voice.language.words.phone_cues

    def speak(self, match: re.Match[str]) -> str | None:
        return self._spell(match[0])

    def link(self, match: re.Match[str]) -> str | None:
        return self._spell(match[0].partition("://")[2])

    def _spell(self, address: str) -> str | None:
        spoken = [self._part(part) for part in _PART.findall(address.rstrip("/"))]
        return " ".join(filter(None, spoken)) or None

    def _part(self, part: str) -> str:
        if part.isdecimal():
            return self._say.code(part) if len(part) <= 4 else digits(part)
        if not part.isalpha():
            return self._signs.get(part, "")
        part = part.lower()
        is_word = re.search(r"[aeiouy]|[^\x00-\x7f]", part) and (
            len(part) > 2 or _SYLLABLE.match(part)
        )
        return part if is_word else " ".join(part)

    def host(self, match: re.Match[str]) -> str:
        return " dot ".join(digits(part) for part in match[0].partition(":")[0].split(".")) + (
            f" colon {digits(match[0].partition(':')[2])}" if ":" in match[0] else ""
        )

    def phone(self, match: re.Match[str]) -> str:
        groups = re.findall(r"\d+", match[0])
        plus = "plus " if match[0].startswith("+") else ""
        return plus + ", ".join(map(digits, groups))

    def cued_phone(self, match: re.Match[str]) -> str | None:
        before = match.string[max(0, match.start() - 14) : match.start()].rstrip(" :.")
        has_cue = before.rpartition(" ")[2].lower() in self._phone_cues
        return self.phone(match) if has_cue else None

    def version(self, match: re.Match[str]) -> str:
        return " point ".join(map(self._say.number, match[0].split(".")))

    def hashtag(self, match: re.Match[str]) -> str:
        return f"hashtag {self._identifier(match[1])}"

    def handle(self, match: re.Match[str]) -> str:
        return f"at {self._identifier(match[1])}"

    def _identifier(self, name: str) -> str:
        """The words of camelCase or snake_case, in small letters; digits as a code."""
        return " ".join(map(self._piece, _CAMEL.findall(name)))

    def _piece(self, part: str) -> str:
        if part.isdecimal():
            return self._say.code(part)
        return " ".join(part) if part.isupper() and len(part) < 4 else part.lower()
