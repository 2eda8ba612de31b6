"""Reduces raw text to plain characters that the rules know, with each one's source offset.

Owns Unicode folding, white space, Markdown marks, control characters and emoji. Knows nothing of
how a language reads a sign: it only decides which signs remain.
"""

# ruff: noqa: RUF001  # typographic signs are the subject here
from __future__ import annotations

import re
import string
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Emoji = Literal["drop", "name"]

HARD_BREAK = "\n\n"
"""The replacement for the end of a paragraph, a heading or a list item."""

_LIST_NUMBER = re.compile(r"(?:\d{1,3}|[A-Za-z])[.)][ \t]+(?=\S)")
_BULLET = re.compile(r"(?:(?:[-*+•‣◦–]|>{1,3}|#{1,6})[ \t]{1,8}){1,4}(?=\S)")
_RULER = re.compile(r"(?:-{3,100}|={3,100}|\*{3,100}|_{3,100}|`{3,20})[ \t]*(?=\n|\Z)")
_PIECE = re.compile(r"\s+|[A-Za-z0-9 ,.;:!?'\"()-]+|\*\*+|__+|~~+|.", re.DOTALL)

_PLAIN = frozenset(string.ascii_letters + string.digits + " ,.;:!?'\"()-")
_KEPT_SIGNS = frozenset("#$%&*+/<=>@^_~°©§¶±×÷‰→↔⇒∈∑√∞∂∫≈≠≡≤≥¢£€¥₩₹₽₿₺₪₫₱₴′″")
_KEPT_MARKS = frozenset("…—–¿¡。、！？，；：・")
_REPLACED = {
    **dict.fromkeys("‐‑‒−⁃", "-"),
    **dict.fromkeys("―⸺⸻", "—"),
    **dict.fromkeys("‘’‚‛´ʼ＇", "'"),
    **dict.fromkeys("“”„‟«»‹›「」『』《》＂", '"'),
    **dict.fromkeys("[{【〔（［｛", "("),
    **dict.fromkeys("]}】〕）］｝", ")"),
    **dict.fromkeys("。｡", "。"),
    **dict.fromkeys("।॥", "."),
    "ª": "a",
    "º": "°",
    "˚": "°",
    "·": "・",
    "⁄": "/",
    "∕": "/",
    "∶": ":",
    "№": "No. ",
    "™": "",
    "®": "",
    "`": "",
}
_EMOJI_RANGES = ((0x1F000, 0x1FAFF), (0x2300, 0x23FF), (0x2600, 0x27BF), (0x2B00, 0x2BFF))
_REGIONAL_A = 0x1F1E6


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Plain text; `starts[i]` is the source offset of its character `i`, the last its length.

    Character `i` represents the source from `starts[i]` to `starts[i + 1]`: dropped characters
    belong to the one before them, or to the first.
    """

    text: str
    starts: list[int]


def clean(text: str, *, emoji: Emoji = "drop") -> Cleaned:
    """Fold `text` to characters that the rules know; linear in its length.

    White space becomes one space, or `HARD_BREAK` at the end of a paragraph or list item. Letters,
    digits and punctuation of every width and style become plain ones.
    """
    return _Cleaner(text, emoji).run()


class _Cleaner:
    def __init__(self, text: str, emoji: Emoji) -> None:
        self._text = text
        self._names_emoji = emoji == "name"
        self._chars: list[str] = []
        self._starts: list[int] = []
        self._raised_end = -1  # end of a superscript, if it is the last character emitted

    def run(self) -> Cleaned:
        text, at = self._text, self._line_start(0)
        while at < len(text):
            match = _PIECE.match(text, at)
            assert match is not None
            piece, end = match.group(), match.end()
            if piece.isspace():
                end = self._space(at, end)
            elif len(piece) > 1 or piece.isascii():
                self._ascii(piece, at)
            else:
                self._fold(piece, at)
            at = end
        self._trim()
        if self._starts:
            self._starts[0] = 0
        return Cleaned("".join(self._chars), [*self._starts, len(text)])

    def _put(self, piece: str, at: int) -> None:
        self._chars.extend(piece)
        self._starts.extend([at] * len(piece))

    def _put_space(self, at: int) -> None:
        if self._chars and not self._chars[-1].isspace():
            self._put(" ", at)

    def _line_start(self, at: int) -> int:
        """Skip the marks of headings, bullets, quotations and rulers; returns where text begins."""
        mark = _RULER.match(self._text, at) or _BULLET.match(self._text, at)
        return mark.end() if mark else at

    def _space(self, at: int, end: int) -> int:
        """Emit one space or a hard break; returns where the next text begins."""
        newlines = self._text.count("\n", at, end)
        if not newlines:
            self._put_space(at)
            return end
        begin = self._line_start(end)
        begins_item = begin > end or _LIST_NUMBER.match(self._text, end) is not None
        line = self._text.rfind("\n", max(0, at - 200), at) + 1
        is_heading = self._text.startswith("#", line)
        is_break = newlines > 1 or begins_item or is_heading
        if is_break:
            self._trim()
        if is_break and self._chars:
            self._put(HARD_BREAK, at)
        else:
            self._put_space(at)
        return begin

    def _trim(self) -> None:
        while self._chars and self._chars[-1].isspace():
            self._chars.pop()
            self._starts.pop()

    def _ascii(self, piece: str, at: int) -> None:
        if piece in _REPLACED:
            self._put(_REPLACED[piece], at)
        elif piece[0] in "*_~" and len(piece) > 1:
            return  # the marks of bold and struck text
        elif piece[0] in _PLAIN:
            self._plain(piece, at)
        elif piece in _KEPT_SIGNS:
            self._put(piece, at)
        elif piece.isprintable():
            self._put_space(at)

    def _plain(self, piece: str, at: int) -> None:
        if piece[0] != " " and "  " not in piece:
            self._chars.extend(piece)
            self._starts.extend(range(at, at + len(piece)))
            return
        for offset, char in enumerate(piece, at):
            if char == " ":
                self._put_space(offset)
            else:
                self._put(char, offset)

    def _fold(self, char: str, at: int) -> None:
        category = unicodedata.category(char)
        if category[0] == "M":
            self._mark(char, at)
        elif category == "Nd":
            self._put(str(unicodedata.digit(char)), at)
        elif _is_emoji(char):
            self._emoji(char, at)
        elif category not in ("Cc", "Cf", "Cs", "Co", "Cn"):
            self._put_folded(_fold(char), at)

    def _mark(self, char: str, at: int) -> None:
        """Compose an accent with its letter; other scripts keep their vowel signs."""
        if not self._chars or not (self._chars[-1].isalpha() or _is_mark(self._chars[-1])):
            return
        composed = unicodedata.normalize("NFC", self._chars[-1] + char)
        if len(composed) == 1:
            self._chars[-1] = composed
        elif unicodedata.name(char, "").startswith(("COMBINING", "VARIATION")):
            return
        elif len(self._chars) < 4 or not all(map(_is_mark, self._chars[-4:])):
            self._put(char, at)

    def _put_folded(self, folded: str, at: int) -> None:
        if folded == " ":
            self._put_space(at)
        elif folded.startswith("^"):
            self._put(folded[1:] if self._raised_end == len(self._chars) else folded, at)
            self._raised_end = len(self._chars)
        else:
            if "/" in folded[1:] and self._chars and self._chars[-1].isdigit():
                self._put_space(at)  # 1½ is "1 1/2"
            self._put(folded, at)

    def _emoji(self, char: str, at: int) -> None:
        name = unicodedata.name(char, "")
        if name.startswith("REGIONAL INDICATOR") and self._names_emoji:
            self._put(chr(ord("A") + ord(char) - _REGIONAL_A), at)
            return
        self._put_space(at)
        if self._names_emoji and not name.startswith("EMOJI MODIFIER"):
            self._put(re.sub(r"[^A-Z]+", " ", name).strip().lower(), at)
            self._put_space(at)


def _is_mark(char: str) -> bool:
    return unicodedata.category(char)[0] == "M"


def _is_emoji(char: str) -> bool:
    is_near = any(low <= ord(char) <= high for low, high in _EMOJI_RANGES)
    return is_near and unicodedata.category(char) in ("So", "Sk")


@lru_cache(maxsize=4096)
def _fold(char: str) -> str:
    """The plain form of a character; a space for an unknown sign."""
    if char in _REPLACED:
        return _REPLACED[char]
    if char in _KEPT_SIGNS or char in _KEPT_MARKS:
        return char
    tag, _, _ = unicodedata.decomposition(char).partition(" ")
    plain = unicodedata.normalize("NFKC", char)
    plain = "".join(_REPLACED.get(each, each) for each in plain)
    if tag == "<super>" and (plain.isdigit() or plain in "+-"):
        return f"^{plain}"
    if unicodedata.category(char)[0] == "L" and not tag.startswith("<"):
        return plain if plain.isalpha() else char
    known = _PLAIN | _KEPT_SIGNS | _KEPT_MARKS
    is_known = all(each.isalpha() or each in known for each in plain)
    return plain if plain != char and is_known else " "
