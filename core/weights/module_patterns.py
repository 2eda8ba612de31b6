"""Patterns of module paths in PEFT's `rank_pattern` and `alpha_pattern`.

Owns the subset of regular expressions that is accepted, and its match in a time that grows with the
product of both lengths: files come from anywhere, and a backtracking match could take forever.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

MAX_CHARS = 256
"""The most characters of a pattern."""
_TOKEN = re.compile(
    r"(?P<open>\((?:\?:)?)|(?P<mark>[|)^$])"
    r"|(?P<one>\\[dw.]|\.|\w|-|\[[\w-]+\])(?P<many>[+*?]?)"
)


class ModulePattern:
    r"""A pattern of names, dots, `\d`, `\w`, sets, alternatives and the ends `^` and `$`.

    `+`, `*` and `?` follow single characters. Raises `ValueError` for anything else.
    """

    __slots__ = ("_plain", "_tokens")

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_CHARS:
            raise ValueError(f"a pattern has over {MAX_CHARS} characters")
        self._tokens: list[re.Match[str]] = []
        depth = at = 0
        while at < len(pattern):
            token = _TOKEN.match(pattern, at)
            depth += 0 if token is None else (token["open"] is not None) - (token["mark"] == ")")
            if token is None or depth < 0:
                raise ValueError(f"{pattern[at : at + 20]!a} in a pattern is not offered")
            _test(token["one"] or "")
            self._tokens.append(token)
            at = token.end()
        if depth:
            raise ValueError("a pattern has an open parenthesis")
        is_plain = all(token["one"] and not token["many"] for token in self._tokens)
        self._plain = re.compile(rf"(?:.*\.)?{pattern}") if is_plain else None

    def matches(self, module: str) -> bool:
        """Whether the pattern is the path of a module, or its end after a dot, as in PEFT."""
        if self._plain is not None:  # which has one way to match, and is a usual name
            return self._plain.fullmatch(module) is not None
        starts = {0, *(at + 1 for at, char in enumerate(module) if char == ".")}
        return len(module) in _ends(iter(self._tokens), module, starts)


@lru_cache(maxsize=4096)
def module_pattern(pattern: str) -> ModulePattern:
    """The pattern of a text. Raises `ValueError`."""
    return ModulePattern(pattern)


def _ends(tokens: Iterator[re.Match[str]], module: str, starts: set[int]) -> set[int]:
    """Where alternatives that begin at `starts` may end; consumes `tokens` up to their `)`."""
    ends, places = set[int](), starts
    for token in tokens:
        if token["open"]:
            places = _ends(tokens, module, places)
        elif token["one"]:
            places = _after(token["one"], token["many"], module, places)
        elif token["mark"] == "|":
            ends, places = ends | places, starts
        elif token["mark"] == ")":
            break
        else:
            places = places & {0 if token["mark"] == "^" else len(module)}
    return ends | places


def _after(one: str, many: str, module: str, places: set[int]) -> set[int]:
    """The places after a character, or after several, from each of `places` on."""
    found = set(places) if many in ("*", "?") else set[int]()
    reached = places
    while reached:
        reached = {at + 1 for at in reached if at < len(module) and _is(one, module[at])} - found
        found |= reached
        if many not in ("+", "*"):
            break
    return found


@lru_cache(maxsize=1024)
def _test(one: str) -> re.Pattern[str]:
    """The test of one character. Raises `ValueError` for a wrong set."""
    try:
        return re.compile(one)
    except re.error as error:
        raise ValueError(f"{one!a} in a pattern is not offered") from error


def _is(one: str, char: str) -> bool:
    return one == char or _test(one).fullmatch(char) is not None
