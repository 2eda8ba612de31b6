"""Patterns mean what ECMAScript says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.guided import COMPILER, ids_of, takes
from triptych.core.errors import UnsupportedOption
from triptych.core.grammar.patterns import other_names, portable_pattern
from triptych.core.grammar.source import to_grammar

S = {"type": "string"}


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
        (r"^[^\\]$", ['"', "\n", "x"], ["\\"]),
        (r'^[^"]$', ["\\", "\n", "x"], ['"']),
        (r'^[^\\/:*?"<>|]+$', ["a b.txt", "\n"], ["\\", 'a"', "a/b"]),
        (r"^[^!-~]$", [" ", "é"], ["\\", '"', "x"]),
        (r"^[^\w]$", ["\\", '"', " "], ["x"]),
        (r"^[a&&b]+$", ["a&b"], ["c"]),
        (r"^[a~~b]+$", ["~a"], ["c"]),
        (r"^[+--]$", ["+", ",", "-"], ["a"]),
        (r"^[^]$", ["\n", "x"], ["xx"]),
        (r"^\cJ$", ["\n"], ["J"]),
        (r"^[\b]$", ["\b"], ["b"]),
        (r"^\d\w$", ["1a"], ["\u0661a", "1é"]),
        (r"^\\s$", ["\\s"], [" "]),
        ("^\U0001f432$", ["\U0001f432"], ["x"]),
        (r"^f\(?=x$", ["f=x", "f(=x"], ["fx", "f"]),
        (r"^[(?=]$", ["(", "?", "="], ["x"]),
        (r"^[\](?!]$", ["]", "!"], ["x"]),
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


NAMES = st.text(st.sampled_from("aé\n\\^]-\U0001f432"), max_size=3)


@given(st.lists(NAMES, min_size=1, max_size=5), NAMES)
def test_a_pattern_of_other_names_has_all_but_those(names: list[str], name: str) -> None:
    pattern = other_names(names)
    assert pattern is not None
    assert takes({"type": "string", "pattern": pattern}, name) == (name not in names)


def test_a_name_with_escapes_is_none_of_the_others() -> None:
    own = {"a": {"type": "integer"}, "état": {"type": "null"}, "x" * 200: {"type": "null"}}
    for names in (["a"], ["a", "état"]):
        properties = {name: own[name] for name in names}
        schema = {"type": "object", "properties": properties, "additionalProperties": S}
        grammar = to_grammar("json_schema", json.dumps(schema))
        for text, fits in (
            ('{"b": "x"}', True),
            ('{"": "x", "ab": "x"}', True),
            ('{"a": 1, "b": "x"}', True),
            ('{"a": "x"}', False),
            (r'{"\u0061": "x"}', False),
            (r'{"a": 1, "\u0061": "x"}', False),
            (r'{"\u00e9tat": "x"}', False),
        ):
            ids, matcher = ids_of(text), COMPILER.compile(grammar)
            assert (matcher.try_consume_tokens(ids) == len(ids)) == fits, text
    assert takes({"type": "object", "properties": own, "additionalProperties": S}, {"b": "x"})
