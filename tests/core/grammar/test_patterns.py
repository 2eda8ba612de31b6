"""Patterns mean what ECMAScript says."""

from __future__ import annotations

import pytest

from support.guided import takes
from triptych.core.errors import UnsupportedOption
from triptych.core.grammar.patterns import portable_pattern


@pytest.mark.parametrize(
    ("pattern", "fits", "fails"),
    [
        (r"^\s$", ["\ufeff", "\u2003", " ", "\t"], ["\u0085", "x"]),
        (r"^\S$", ["x", "\u0085"], ["\ufeff", "\u00a0", " "]),
        (r"^[\s,]+$", ["\ufeff,", ", "], ["x"]),
        (r"^[^\s]$", ["x"], ["\ufeff"]),
        (r"^[\S ]$", ["x", " "], ["\t"]),
        (r"^.$", ["x", "\u0085"], ["\r", "\u2028", "\n"]),
        (r"^\.[.]$", [".."], ["x."]),
        (r"^[^[\]]+$", ["ab"], ["a[", "]"]),
        (r"^[[]$", ["["], ["]"]),
        (r"^[a&&b]+$", ["a&b"], ["c"]),
        (r"^[a~~b]+$", ["~a"], ["c"]),
        (r"^[+--]$", ["+", ",", "-"], ["a"]),
        (r"^[^]$", ["\n", "x"], ["xx"]),
        (r"^\cJ$", ["\n"], ["J"]),
        (r"^[\b]$", ["\b"], ["b"]),
        (r"^\d\w$", ["1a"], ["\u0661a", "1é"]),
        (r"^\\s$", ["\\s"], [" "]),
        ("^\U0001f432$", ["\U0001f432"], ["x"]),
    ],
)
def test_a_pattern_means_what_the_standard_says(
    pattern: str, fits: list[str], fails: list[str]
) -> None:
    found = {text: takes({"type": "string", "pattern": pattern}, text) for text in (*fits, *fails)}
    assert found == dict.fromkeys(fits, True) | dict.fromkeys(fails, False)
    names = {"type": "object", "patternProperties": {pattern: True}, "additionalProperties": False}
    assert takes(names, {fits[0]: 1})
    assert not takes(names, {fails[0]: 1})


@pytest.mark.parametrize(
    ("name", "fits", "fails"),
    [
        ("hostname", ["a", "a-b.c", "1.de", "a--b", "x" * 63], ["", "-a", "a.", "ab--c", "x" * 64]),
        ("hostname", ["xn-a", "abc--d"], ["xn--a", "a.XN--b", "a_b", "a..b"]),
        ("date", ["2024-02-29"], ["2023-02-29", "2024-2-29"]),
        ("time", ["23:59:59Z", "00:00:00.5+01:30"], ["24:00:00Z", "10:00:00"]),
    ],
)
def test_a_format_is_a_pattern(name: str, fits: list[str], fails: list[str]) -> None:
    found = {text: takes({"type": "string", "format": name}, text) for text in (*fits, *fails)}
    assert found == dict.fromkeys(fits, True) | dict.fromkeys(fails, False)


@pytest.mark.parametrize("look", ["(?=", "(?!", "(?<=", "(?<!"])
def test_what_looks_around_is_refused(look: str) -> None:
    with pytest.raises(UnsupportedOption, match="pattern at #/items/pattern: look"):
        portable_pattern(f"^{look}a)b", "#/items/pattern")
