"""Regular expressions for JSON schemas: of formats, of callers' patterns, and of other names.

Owns the translation from ECMAScript's syntax, which the standard prescribes, to that of Rust, which
llguidance reads; and the pattern for property names that a schema does not list. Knows no schemas.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from triptych.core.errors import UnsupportedOption

_LEAP: Final = "(?:0[48]|[2468][048]|[13579][26])"
_YEAR: Final = r"(?:[1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])".replace(r"\d", "[0-9]")
_DATE: Final = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_TIME: Final = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_ALNUM, _INNER = "[A-Za-z0-9]", "[A-Za-z0-9-]"
_LABEL: Final = (
    f"{_ALNUM}(?:{_INNER}{{0,2}}{_ALNUM}"
    f"|{_INNER}(?:{_ALNUM}{_INNER}|-{_ALNUM}){_INNER}{{0,58}}{_ALNUM})?"
)
"""A label of a host name. Hyphens in third and fourth place mean Punycode, which is excluded."""
FORMATS: Final[Mapping[str, str]] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
}
"""The formats for which a pattern is exact and the check of llguidance is not."""
_ANY: Final = r"[\x00-\u{10ffff}]"
_NOT: Final = r"[^\x00"
"""The start of a negated class. It excludes NUL, because for a class with all control characters
llguidance also accepts a quotation mark and a backslash, whether the class has them or not."""
_MAX_DEPTH: Final = 64
"""The longest name in characters, which is the nesting depth of groups."""
_LOOKS_AROUND: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*+\]?|(\(\?(?:[=!]|<[=!]))", re.DOTALL)
"""Skips escapes and character classes; the group is a look-around."""
_PARTS: Final = re.compile(r"\\c[A-Za-z]|\\.|\[\^?\]?|--|.", re.DOTALL)
_SPACE: Final = r"\t\n\x0b\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_OUTSIDE: Final[Mapping[str, str]] = {
    ".": r"[^\n\r\u2028\u2029]",
    r"\s": f"[{_SPACE}]",
    r"\S": f"[^{_SPACE}]",
    "[]": r"[^\x00-\u{10ffff}]",
    "[^": _NOT,
    "[^]": _ANY,
}
_INSIDE: Final[Mapping[str, str]] = {
    r"\s": _SPACE,
    r"\S": f"[^{_SPACE}]",
    r"\b": r"\x08",
    "[": r"\[",
    "[]": r"\[]",
    "[^": r"\[^",
    "[^]": r"\[^]",
    "&": r"\&",
    "~": r"\~",
    "--": r"-\-",
}


def looks_around(pattern: str) -> str:
    """The opening of the first look-ahead or look-behind; empty if there is none."""
    return next((found[1] for found in _LOOKS_AROUND.finditer(pattern) if found[1]), "")


def portable_pattern(pattern: str, at: str) -> str:
    """Translate `pattern` for llguidance. Raises `UnsupportedOption` for look-arounds."""
    if look := looks_around(pattern):
        raise UnsupportedOption(
            f"pattern at {at}: look-ahead and look-behind ({look}) cannot be enforced: write it"
            " without."
        )
    written: list[str] = []
    is_inside = False
    for part in _PARTS.findall(pattern):
        if part[:2] == r"\c" and len(part) == 3:
            written.append(rf"\x{ord(part[2]) % 32:02x}")
            continue
        written.append((_INSIDE if is_inside else _OUTSIDE).get(part, part))
        ends = part.endswith("]") and part != r"\]"
        is_inside = not ends if is_inside else part in ("[", "[^")
    return "".join(written)


def other_names(names: Iterable[str]) -> str | None:
    """A pattern for all strings except `names`; `None` if it would be too deep."""
    tree: dict[str, Any] = {}
    for name in names:
        if len(name) > _MAX_DEPTH:
            return None
        node = tree
        for letter in name:
            node = node.setdefault(letter, {})
        node[""] = {}
    return f"^{_other_ends(tree)}$"


def _other_ends(node: Mapping[str, Any]) -> str:
    """A pattern for all suffixes that do not complete a name, from a node in the trie of names."""
    letters = {letter: _code(letter) for letter in node if letter}
    ways = [f"{_NOT}{''.join(letters.values())}]{_ANY}*" if letters else f"{_ANY}+"]
    ways += [code + _other_ends(node[letter]) for letter, code in letters.items()]
    return f"(?:{'|'.join(ways)}){'' if '' in node else '?'}"


def _code(letter: str) -> str:
    return rf"\u{{{ord(letter):x}}}"
