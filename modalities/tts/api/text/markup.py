"""Reduces Markdown and HTML to the words read aloud: the text of a link, the cells of a table.

Owns which marks are dropped and which become punctuation, with the source of every remaining
character. Knows nothing of how a language reads them. Markdown parsers keep line numbers, not
offsets, so the place of a word in the source would be lost; hence the few constructs that answers
use are found here.

Text without marks is unchanged. Code is left alone, except for its fences.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

_FENCE = re.compile(r"^[ \t]{0,12}(?P<fence>`{3,}|~{3,})[^\n`]{0,200}$", re.MULTILINE)
_CODE = re.compile(r"(`{1,3})(?!`)[^`\n]{1,1000}\1(?!`)")
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_BRACKET = re.compile(r"(?<!\\)(!?\[|\])")
_DESTINATION = re.compile(
    r"\([ \t]{0,9}(?:<[^<>\n]{0,2048}>|[^\s()]{0,2048}(?:\([^\s()]{0,500}\)[^\s()]{0,500}){0,4})"
    r"(?:[ \t]{1,9}(?:\"[^\"\n]{0,500}\"|'[^'\n]{0,500}'|\([^()\n]{0,500}\)))?[ \t]{0,9}\)"
)
_REFERENCE = re.compile(r" ?\[([^\[\]\n]{0,200})\]")
_DEFINITION = re.compile(
    r"^[ \t]{0,3}\[(?!\^)([^\[\]\n]{1,200})\]:[ \t]{0,9}\S{1,2048}[^\n]{0,500}(?:\n|\Z)",
    re.MULTILINE,
)
_FOOTNOTE = re.compile(r"\[\^[^\[\]\s]{1,60}\](?::[ \t]{0,9})?")
_TASK = re.compile(r"(?m:^)[ \t]{0,20}(?:[-*+]|\d{1,3}[.)])[ \t]{1,4}(\[[ xX]\][ \t]{1,4})(?=\S)")
_AUTOLINK = re.compile(r"<((?:https?|ftp|mailto):[^\s<>]{1,2048}|[\w.+-]{1,64}@[\w.-]{1,255})>")
_BREAKING = (
    "address|article|blockquote|br|dd|div|dl|dt|footer|h[1-6]|header|hr|li|"
    "main|nav|ol|p|pre|section|table|tbody|td|tfoot|th|thead|tr|ul"
)
_INLINE = (
    "a|abbr|b|big|cite|code|del|details|dfn|em|font|i|img|ins|kbd|"
    "mark|q|s|samp|small|span|strike|strong|sub|summary|sup|tt|u|var|wbr"
)
_TAG = re.compile(
    rf"</?(?P<name>{_BREAKING}|{_INLINE})"
    r"(?:\s{1,9}[\w:-]{1,60}=(?:\"[^\"<>]{0,2048}\"|'[^'<>]{0,2048}'|[^\s\"'=<>`]{1,2048})){0,20}\s{0,9}/?>",
    re.IGNORECASE,
)
_COMMENT = "<!--", "-->"
_MAX_COMMENT = 10_000
_MAX_LABEL = 200
_CLOSING_LETTER = re.compile(r"</([a-z])>")
_ALT = re.compile(r"\salt=(?:\"([^\"<>]*)\"|'([^'<>]*)')", re.IGNORECASE)
_IS_BREAKING = re.compile(_BREAKING, re.IGNORECASE)
_LINE = re.compile(r"[^\n]*(?:\n|\Z)")
_TABLE_RULER = re.compile(r"[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*")
_PIPE = re.compile(r"(?<!\\)\|")
_STOPS = tuple(".!?:;…")


class Edit(NamedTuple):
    """The replacement for the characters `start:end`."""

    start: int
    end: int
    text: str


class StrippedText(NamedTuple):
    """Text without markup.

    `starts[i]` is the source offset of character `i`, the last one the length of the source.
    """

    text: str
    starts: list[int]


def strip_markup(source: str) -> StrippedText:
    """`source` as it is read aloud; takes linear time."""
    pieces: list[str] = []
    starts: list[int] = []
    done = 0
    for start, end, text in sorted(_edits(source), key=lambda edit: (edit.start, -edit.end)):
        if start < done:
            continue
        pieces += [source[done:start], text]
        starts += range(done, start)
        starts += [start] * len(text)
        done = end
    starts += range(done, len(source) + 1)
    return StrippedText("".join([*pieces, source[done:]]), starts)


def _edits(source: str) -> Iterator[Edit]:
    prose = list(source)
    for start, end in _code(source):
        prose[start:end] = " " * (end - start)
        if _FENCE.match(source, start, end):
            yield from _fences(source, start, end)
    text = "".join(prose)
    yield from _links(text)
    yield from (Edit(*match.span(1), "") for match in _TASK.finditer(text))
    for match in _AUTOLINK.finditer(text):
        yield Edit(match.start(), match.start() + 1, "")
        yield Edit(match.end() - 1, match.end(), "")
    yield from _comments(text)
    yield from _tags(text)
    yield from _tables(text)
    for match in _ENTITY.finditer(text):
        plain = html.unescape(match[0])
        if plain != match[0]:
            yield Edit(*match.span(), plain)


def _code(source: str) -> Iterator[tuple[int, int]]:
    """The spans of code: blocks with their fences, and code spans in a line."""
    at = 0
    fences = list(_FENCE.finditer(source))
    blocks: list[tuple[int, int]] = []
    opened: re.Match[str] | None = None
    for fence in fences:
        if opened is None:
            opened = fence
        elif fence["fence"].startswith(opened["fence"]) and not fence[0].strip(" \t`~"):
            blocks.append((opened.start(), fence.end()))
            opened = None
    if opened is not None:
        blocks.append((opened.start(), len(source)))
    for start, end in [*blocks, (len(source), len(source))]:
        yield from (match.span() for match in _CODE.finditer(source, at, start))
        if end > start:
            yield start, end
        at = end


def _fences(source: str, start: int, end: int) -> Iterator[Edit]:
    """Drop the two lines around a block of code, including the name of its language."""
    first = source.find("\n", start, end)
    yield Edit(start, end if first < 0 else first, "")
    last = source.rfind("\n", start, end) + 1
    if first >= 0 and last > first and not source[last:end].strip(" \t`~"):
        yield Edit(last, end, "")


def _links(text: str) -> Iterator[Edit]:
    definitions = list(_DEFINITION.finditer(text))
    known = {match[1].casefold() for match in definitions}
    yield from (Edit(*match.span(), "") for match in definitions)
    yield from (Edit(*match.span(), "") for match in _FOOTNOTE.finditer(text))
    openers: list[re.Match[str]] = []
    for bracket in _BRACKET.finditer(text):
        if bracket[0] != "]":
            openers.append(bracket)
            continue
        if not openers:
            continue
        opener = openers.pop()
        is_label = bracket.start() - opener.end() <= _MAX_LABEL
        label = text[opener.end() : bracket.start()] if is_label else ""
        if end := _target_end(text, bracket.end(), label, known):
            yield Edit(*opener.span(), "")
            yield Edit(bracket.start(), end, "")


def _target_end(text: str, at: int, label: str, known: set[str]) -> int | None:
    """Where the target of a link ends whose words end before `at`; None if it is no link.

    The words are `label`, if they are short enough for the name of a definition.
    """
    if destination := _DESTINATION.match(text, at):
        return destination.end()
    reference = _REFERENCE.match(text, at) if known else None
    if reference and (reference[1] or label).casefold() in known:
        return reference.end()
    return at if label.casefold() in known else None


def _comments(text: str) -> Iterator[Edit]:
    begin, close = _COMMENT
    start = text.find(begin)
    while start >= 0:
        inner = start + len(begin)
        end = text.find(close, inner, inner + _MAX_COMMENT + len(close))
        if end >= 0:
            inner = end + len(close)
            yield Edit(start, inner, "")
        start = text.find(begin, inner)


def _tags(text: str) -> Iterator[Edit]:
    closed = set(_CLOSING_LETTER.findall(text.lower()))
    for match in _TAG.finditer(text):
        name = match["name"].lower()
        if len(name) == 1 and name not in closed:
            continue  # "a <b> c" compares
        alt = _ALT.search(match[0]) if name == "img" else None
        if alt:
            yield Edit(*match.span(), html.unescape(alt[1] or alt[2] or ""))
        elif name in ("td", "th"):
            yield Edit(*match.span(), ", " if match[0].startswith("</") else "")
        else:
            is_breaking = _IS_BREAKING.fullmatch(name) is not None
            yield Edit(*match.span(), "\n\n" if is_breaking else "")


def _tables(text: str) -> Iterator[Edit]:
    lines = [match.span() for match in _LINE.finditer(text) if match[0]]
    is_row = ["|" in text[start:end] for start, end in lines]
    at = 1
    while at < len(lines):
        start, end = lines[at]
        ruler = text[start:end].rstrip("\n")
        if not (is_row[at] and is_row[at - 1] and _TABLE_RULER.fullmatch(ruler)):
            at += 1
            continue
        yield from _row(text, *lines[at - 1])
        yield Edit(start, end, "")
        at += 1
        while at < len(lines) and is_row[at]:
            yield from _row(text, *lines[at])
            at += 1


def _row(text: str, start: int, end: int) -> Iterator[Edit]:
    """A comma after each cell, a full stop after the last."""
    stop = start + len(text[start:end].rstrip())
    pipes = [match.start() for match in _PIPE.finditer(text, start, stop)]
    edges = [start, *pipes, stop]
    is_filled = [bool(text[left:right].strip(" \t|")) for left, right in pairwise(edges)]
    last_filled = max((number for number, is_one in enumerate(is_filled) if is_one), default=-1)
    for number, (left, pipe) in enumerate(zip(edges, pipes, strict=False)):
        is_followed = number < last_filled
        cell = text[left:pipe].rstrip()
        mark = "," if is_filled[number] and is_followed and not cell.endswith(_STOPS) else ""
        yield Edit(left + len(cell), pipe + 1, mark + (" " if is_followed else ""))
    body = text[start:stop].rstrip(" \t|")
    if any(is_filled) and not body.endswith(_STOPS):
        yield Edit(stop, end, ".\n")
