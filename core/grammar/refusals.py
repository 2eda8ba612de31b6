"""Translating errors of the grammar library into messages for callers.

Owns the table of messages, and locations in a grammar's text. Knows no grammars and no schemas.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Final

from triptych.core.errors import InvalidRequest, RequestError, UnsupportedOption
from triptych.core.process.logs import fields

_log = logging.getLogger(__name__)
_MAX_REASON_CHARS: Final = 240
_PLACE: Final = re.compile(
    r"^(?:at )?(?!1\(8\): invalid regex)([0-9]+)\(([0-9]+)\): (?!failed to compile JSON schema)"
)
"""A line and a column, except in texts that the caller did not write: the library's grammar around
a regular expression, and ours around schemas."""
_PREFIX: Final = re.compile(
    r"^(?:at )?[0-9]+\([0-9]+\): (?:failed to compile JSON schema: )?(?:at EOF: )?"
)
_EXCERPT: Final = re.compile(r"\n\s*[0-9]+ \| ")
_DEPTH: Final = "recursion limit|intersection stack level"
_WIDTH: Final = "schema too large|grammar size|initial lexer configuration"
_SIZE: Final = re.compile(f"{_DEPTH}|{_WIDTH}")
_MEANINGS: Final[Sequence[tuple[re.Pattern[str], type[RequestError], str]]] = (
    (
        re.compile(r"Unimplemented keys: \[(.*)\]"),
        UnsupportedOption,
        "This keyword of JSON schemas cannot be enforced: {}.",
    ),
    (
        re.compile("oneOf constraints"),
        UnsupportedOption,
        "This oneOf cannot be enforced, since an answer may be of two of its branches: use anyOf.",
    ),
    (
        re.compile("patternProperty regexes (.{1,100}) are (?:not )?disjoint"),
        UnsupportedOption,
        "These patternProperties cannot be enforced, since a name may match two: {}.",
    ),
    (
        re.compile("min/maxProperties only supported"),
        UnsupportedOption,
        "minProperties and maxProperties cannot be enforced where a named property may be left out:"
        " require all of them.",
    ),
    (
        re.compile("'multipleOf' has too many digits"),
        UnsupportedOption,
        "multipleOf has too many digits to be enforced: without the decimal point they are at most"
        " 4294967295.",
    ),
    (re.compile("invalid multiple of"), InvalidRequest, "multipleOf must be above 0."),
    (
        re.compile("Expected positive integer for '([A-Za-z]+)', got (.{1,40})"),
        InvalidRequest,
        "The JSON schema is not well-formed: {} is {}, and must be a whole number of at least 0.",
    ),
    (
        re.compile("Invalid type: (.{0,40})"),
        InvalidRequest,
        "The JSON schema has the type {}, which is none of array, boolean, integer, null, number,"
        " object and string.",
    ),
    (
        re.compile(r"(?:Resource|Pointer|Anchor) '(?:json-schema:///)?([^']{1,80})"),
        InvalidRequest,
        "The JSON schema has a $ref to {}, which is not in it; other documents are not read.",
    ),
    (
        re.compile(_DEPTH),
        InvalidRequest,
        "The JSON schema is nested too deeply.",
    ),
    (
        re.compile(_WIDTH),
        InvalidRequest,
        "The grammar, or schema, is too large to be compiled: simplify it.",
    ),
    (
        re.compile("Unable to determine if regex is empty"),
        InvalidRequest,
        "A pattern, with the lengths and formats that go with it, takes too long to compile:"
        " simplify it.",
    ),
    (
        re.compile(
            "NoExtension|Regex is empty"
            r"|Unsatisfiable schema(: (?:min|max|excl|range|integer|Const|incomp)[^\n]{0,120})?"
        ),
        InvalidRequest,
        "The grammar, or schema, allows no answer at all{}.",
    ),
    (
        re.compile("lookarounds not supported.*in regex /(.{1,80})/"),
        InvalidRequest,
        "The regular expression {} has a word boundary, or looks around: write it without.",
    ),
    (
        re.compile(r"range end must be >= start, got \((.{1,40})\)"),
        InvalidRequest,
        "The grammar has a repetition that ends before it begins: {{{}}}.",
    ),
    (
        re.compile("unknown name: (.{1,80})"),
        InvalidRequest,
        "The grammar names {}, which it does not define.",
    ),
    (
        re.compile("duplicate (?:rule|token).*: (.{1,80})"),
        InvalidRequest,
        "The grammar defines {} twice.",
    ),
    (
        re.compile("circular reference in token (.{1,80}) definition"),
        InvalidRequest,
        "The terminal {} of the grammar is defined by itself: write its name in lower case.",
    ),
    (
        re.compile("no (.{1,40}) rule found"),
        InvalidRequest,
        "The grammar has no rule {}, with which an answer begins.",
    ),
    (
        re.compile("unknown grammar (.{1,80})"),
        UnsupportedOption,
        "The grammar names {}, but other grammars cannot be used in it: write their rules here.",
    ),
    (
        re.compile(r"Unknown common regex: ([^;\n]{1,80})"),
        InvalidRequest,
        "The grammar imports {}, which is not known: define it.",
    ),
    (
        re.compile("Expected token '(.{1,20})', found .*?\\(at (.{1,40}) \\('"),
        InvalidRequest,
        'The grammar has "{1}" where "{0}" belongs.',
    ),
    (
        re.compile("(?:Expected value|expecting rule, token or statement) \\(at (.{1,40}) \\("),
        InvalidRequest,
        'The grammar has "{}" where a name, a text in double quotes or an expression belongs.',
    ),
    (
        re.compile("lexer error"),
        InvalidRequest,
        "The grammar is not in Lark's notation: texts stand in double quotes, with the escapes of"
        " JSON, and regular expressions between slashes.",
    ),
)
"""Patterns of the library's messages, and the error for the caller."""
_BAD_PATTERN: Final = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)\^+\nerror: (.+)")
_MAX_SHOWN: Final = 60


def is_about_size(reason: str) -> bool:
    """Whether the reason is the size or depth of the whole, so that no part is the cause."""
    return _SIZE.search(reason) is not None


def sort_of(reason: str) -> str:
    """The kind of a library error; errors of one kind have the same message."""
    if _BAD_PATTERN.search(reason):
        return "regex"
    return next((message for pattern, _, message in _MEANINGS if pattern.search(reason)), reason)


def refusal(reason: str, place: str = "") -> RequestError:
    """The error for the caller from the library's `reason`.

    The cause is at `place`, or at the line and column in the reason.
    """
    if not place and (found := _PLACE.search(reason)):
        place = f"line {found[1]}, column {found[2]}"
    kind, message = _meaning(reason)
    return kind(f"{message} The cause is at {place}." if place else message)


def _meaning(reason: str) -> tuple[type[RequestError], str]:
    if found := _BAD_PATTERN.search(reason):
        return InvalidRequest, _bad_pattern(*found.groups())
    for pattern, kind, message in _MEANINGS:
        if found := pattern.search(reason):
            parts = [(part or "").replace('"', "") for part in found.groups()]
            return kind, message.format(*parts)
    if "panic" in reason:
        _log.error("the grammar library failed", extra=fields(detail=reason))
        return (
            InvalidRequest,
            "The grammar, or schema, cannot be followed: the grammar library failed.",
        )
    reason = _PREFIX.sub("", reason.replace("<non-verbose/>", "").strip())
    lines = [line.strip() for line in _EXCERPT.split(reason)[0].splitlines() if line.strip()]
    text = " ".join(lines or ["it is not valid"])[:_MAX_REASON_CHARS].rstrip(".")
    return InvalidRequest, f"The grammar, or schema, cannot be followed: {text}."


def _bad_pattern(pattern: str, before: str, error: str) -> str:
    begin = max(0, len(before) - _MAX_SHOWN // 2)
    shown = pattern[begin : begin + _MAX_SHOWN]
    return (
        f"The regular expression {shown} cannot be read: {error}, at its character"
        f" {len(before) + 1}."
    )
