"""Cuts an answer into pieces to speak while it is still being written.

Owns where a piece may end, and what of an answer is not read aloud: blocks of code, and pieces
without words. The other marks of Markdown stay in a piece, whole: speech drops them itself
(`tts.api.text.markup`). So no piece ends inside a link or a code span, and a table is one piece.
Knows neither models nor sound.
"""

# ruff: noqa: RUF001  # typographic signs are the subject here
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from triptych.modalities.tts.api.text.chunks import CLAUSE_ENDS
from triptych.modalities.tts.api.text.sentences import SentenceSpan, split_sentences
from triptych.modalities.tts.api.text.spoken import Boundary

MAX_PIECE = 600
"""Most characters of a piece outside of tables: longer sentences are cut."""
_LEAST_CLAUSE = 16
"""Characters of the shortest clause that is spoken alone."""
_MANY_WORDS = 56
"""Characters after which a sentence without clauses is cut between words, if sound is urgent."""
MAX_WINDOW = 4 * MAX_PIECE
"""Most characters that are looked at together, and of a table."""

_NEXT_WORD = re.compile(r"[\s\"'“‘«(\[¿¡*_#-]*\w+\W|[^\w\s]+\s")
_CLAUSE = re.compile(rf"(?:[{re.escape(''.join(CLAUSE_ENDS))}]+[\"'”’]?\s+|[、，；：]\s*)(?=\S)")
_WORDS = re.compile(
    r"\s+(?=(?:and|or|but|nor|so|yet|because|which|that|who|where|when|while|if|as|than|with|for|to"
    r"|in|on|at|of|from|by|into|about|is|are|was|were)\b)"
)
_SPACE = re.compile(r"\s+(?=\S)")
_FENCE = re.compile(r"^[ \t]{0,12}(?P<fence>`{3,}|~{3,})[^\n`]*\n", re.MULTILINE)
_MAYBE_FENCE = re.compile(r"[ \t]{0,12}(?:[`~]{0,2}|(?:`{3,}|~{3,})[^\n`]*)\Z")
_RULER = re.compile(r"[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*\Z")
_OPEN_LINK = re.compile(r"\[[^\[\]\n]{0,200}\Z|\]\([^()\n]{0,2048}\Z|<[^<>\s]{1,2048}\Z")


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A stretch of an answer as it was written; the pieces tile it.

    `boundary` is the unit that ends with it. One that is not `is_spoken` has nothing to read aloud.
    """

    text: str
    boundary: Boundary
    is_spoken: bool = True


class AnswerCutter:
    """Takes the text of one answer as it is written, and returns its pieces in order."""

    def __init__(self) -> None:
        self._held = ""
        self._fence = ""

    def push(self, text: str) -> None:
        """Take the next characters."""
        self._held += text

    def next(self, *, is_urgent: bool, is_last: bool = False) -> AnswerPiece | None:
        """Return the next piece, `None` if it is not written yet.

        If sound `is_urgent`, a clause or some words are enough, else a piece is a sentence. With
        `is_last` nothing will be pushed any more: pieces follow until all is returned.
        """
        held = self._held[:MAX_WINDOW]
        is_whole = is_last and len(held) == len(self._held)
        if not held:
            return None
        if self._fence:
            return self._code(held, is_whole=is_whole)
        block = _find_block(held, is_whole=is_whole)
        if block.start:
            is_closed = is_whole or block.kind in ("code", "table")
            end, boundary = _cut(held[: block.start], is_urgent=is_urgent, is_closed=is_closed)
            return self._take(end, boundary) if end else None
        if block.kind == "code":
            self._fence = block.fence
            return self._take(block.end, Boundary.PARAGRAPH, is_code=True)
        end = len(held) if len(held) == MAX_WINDOW else block.end
        return self._take(end, Boundary.PARAGRAPH) if end else None

    def _code(self, held: str, *, is_whole: bool) -> AnswerPiece | None:
        """The next lines of a block of code, up to its end."""
        closing = re.compile(rf"^[ \t]*{self._fence}[`~]*[ \t]*(?:\n|\Z)", re.MULTILINE)
        found = closing.search(held)
        if found and (found[0].endswith("\n") or is_whole):
            self._fence = ""
            return self._take(found.end(), Boundary.PARAGRAPH, is_code=True)
        end = len(held) if is_whole or len(held) == MAX_WINDOW else held.rfind("\n") + 1
        return self._take(end, Boundary.PARAGRAPH, is_code=True) if end else None

    def _take(self, end: int, boundary: Boundary, *, is_code: bool = False) -> AnswerPiece:
        text, self._held = self._held[:end], self._held[end:]
        has_words = any(map(str.isalnum, text))
        return AnswerPiece(text, boundary, has_words and not is_code)


class _AnswerBlock(NamedTuple):
    """A block that begins at `start`, the whole text if there is none.

    `unknown` is a line that may begin one. `end` is that of a fence or of a table, 0 for a table
    that is still being written.
    """

    start: int
    kind: Literal["code", "table", "unknown", "none"]
    end: int = 0
    fence: str = ""


def _find_block(held: str, *, is_whole: bool) -> _AnswerBlock:
    """The first block of code or table."""
    start = 0
    while start < len(held):
        end = held.find("\n", start) + 1 or len(held)
        line = held[start:end]
        is_complete = line.endswith("\n") or is_whole
        if fence := _FENCE.match(held, start):
            return _AnswerBlock(start, "code", fence.end(), fence["fence"])
        if not is_complete and _is_begun(line):
            return _AnswerBlock(start, "unknown")
        if "|" in line and (is_complete or line.lstrip().startswith("|")):
            after = held[end : held.find("\n", end) + 1 or len(held)]
            is_known = after.endswith("\n") or is_whole
            if is_known and _RULER.match(after.rstrip("\n")):
                return _AnswerBlock(start, "table", _table_end(held, end, is_whole=is_whole))
            if not is_known and not after.strip(" \t|:-"):
                return _AnswerBlock(start, "unknown")
        start = end
    return _AnswerBlock(len(held), "none")


def _is_begun(line: str) -> bool:
    """Whether an incomplete line may be the fence of a block of code."""
    return bool(line.strip()) and _MAYBE_FENCE.match(line) is not None


def _table_end(held: str, ruler: int, *, is_whole: bool) -> int:
    """Where the table ends whose ruler is at `ruler`; 0 while it is being written."""
    at = held.find("\n", ruler) + 1 or len(held)
    while at < len(held):
        end = held.find("\n", at) + 1
        line = held[at : end or len(held)]
        if "|" not in line and (end or line.strip(" \t")):
            return at
        if not end:
            break
        at = end
    return len(held) if is_whole or len(held) == MAX_WINDOW else 0


def _cut(prose: str, *, is_urgent: bool, is_closed: bool) -> tuple[int, Boundary]:
    """Where the first piece of `prose` ends, and which unit does; 0 if that is not known yet."""
    for span in split_sentences(prose):
        if span.end > MAX_PIECE:
            break
        if _is_safe(prose, span, is_closed=is_closed):
            return span.end, span.boundary
    most = len(prose) > MAX_PIECE
    if not (is_urgent or most):
        return 0, Boundary.INSIDE
    if end := _first_cut(_CLAUSE, prose, is_last=most):
        return end, Boundary.CLAUSE
    if len(prose) < _MANY_WORDS:
        return 0, Boundary.INSIDE
    words = _last_cut(_WORDS, prose) or _last_cut(_SPACE, prose)
    return (words, Boundary.WORD) if words or not most else (MAX_PIECE, Boundary.INSIDE)


def _is_safe(prose: str, span: SentenceSpan, *, is_closed: bool) -> bool:
    """Whether the sentence ends there whatever follows."""
    if span.end == len(prose):
        return is_closed
    is_known = is_closed or _NEXT_WORD.match(prose, span.end) is not None
    return is_known and not _is_open(prose[: span.end])


def _first_cut(pattern: re.Pattern[str], prose: str, *, is_last: bool) -> int:
    """The first place where a clause ends, or the last one within a piece; 0 if there is none."""
    if is_last:
        return _last_cut(pattern, prose)
    found = (match.end() for match in pattern.finditer(prose, _LEAST_CLAUSE))
    return next((end for end in found if not _is_open(prose[:end])), 0)


def _last_cut(pattern: re.Pattern[str], prose: str) -> int:
    found = [match.end() for match in pattern.finditer(prose, _LEAST_CLAUSE, MAX_PIECE)]
    return next((end for end in reversed(found) if not _is_open(prose[:end])), 0)


def _is_open(text: str) -> bool:
    """Whether a code span or a link is open at the end of `text`."""
    line = text[text.rstrip().rfind("\n") + 1 :]
    return line.count("`") % 2 == 1 or _OPEN_LINK.search(line) is not None
