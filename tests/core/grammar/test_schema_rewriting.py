"""Schemas in words that can be enforced: each rule, and that answers stay answers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import UnsupportedOption
from triptych.core.grammar.schema_rewriting import rewritten

S = {"type": "string"}
NAMED = {"type": "object", "properties": {"name": S}, "required": ["name"]}
EMAIL = {"properties": {"email": S}, "required": ["email"]}
PHONE = {"properties": {"phone": S}, "required": ["phone"]}
DEFS = {
    "A": {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
    "B": {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
    "Loop": {"allOf": [NAMED, {"properties": {"next": {"$ref": "#/$defs/Loop"}}}]},
}


@pytest.mark.parametrize(
    "nothing",
    [
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {}},
        {"propertyNames": True},
        {"uniqueItems": False},
        {"uniqueItems": True, "maxItems": 1},
        {"unevaluatedProperties": True},
        {"unevaluatedItems": {}},
        {"dependentRequired": {}},
        {"dependentSchemas": {}},
        {"not": False},
        {"then": S, "else": S},
        {"minContains": 2},
        {"contains": True, "minContains": 0},
        {"default": 2**70, "examples": [2**80], "title": "t", "description": "d"},
        {"format": "cuid2"},
        {"contentEncoding": "base64"},
    ],
)
def test_what_says_nothing_is_dropped(nothing: dict[str, Any]) -> None:
    for base in ({}, {"type": "array", "items": S}, NAMED):
        kept = {"maxItems": 1} if "maxItems" in nothing else {}
        assert rewritten({**base, **nothing}) == {**base, **kept}


@pytest.mark.parametrize("word", ["uniqueItems", "not", "contains", "if", "dependentRequired"])
def test_what_says_something_stays(word: str) -> None:
    value = {"uniqueItems": True, "dependentRequired": {"a": ["b"]}}.get(word, S)
    assert rewritten({"type": "array", word: value})[word] == value


def test_names_of_properties_may_be_those_of_keywords() -> None:
    schema = {"type": "object", "properties": {"title": S, "default": S, "not": S, "format": S}}
    assert rewritten(schema) == schema


def test_names_from_a_list_or_a_pattern() -> None:
    listed = {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": S}
    assert rewritten(listed) == {"properties": {"a": S, "b": S}, "additionalProperties": False}
    matched = {"propertyNames": {"pattern": "^a"}, "additionalProperties": S}
    assert rewritten(matched) == {"patternProperties": {"^a": S}, "additionalProperties": False}


@pytest.mark.parametrize("word", ["anyOf", "oneOf"])
def test_branches_have_what_stands_next_to_them(word: str) -> None:
    found = rewritten({**NAMED, word: [EMAIL, PHONE]})
    assert [set(branch["properties"]) for branch in found[word]] == [
        {"name", "email"},
        {"name", "phone"},
    ]
    assert [branch["required"] for branch in found[word]] == [["name", "email"], ["name", "phone"]]


def test_parts_and_references_are_one_object() -> None:
    whole = {**NAMED, "properties": {"name": S, "email": S}, "required": ["name", "email"]}
    assert rewritten({**NAMED, "allOf": [EMAIL]}) == whole
    assert rewritten({"allOf": [NAMED, EMAIL]}) == whole
    found = rewritten({"$ref": "#/$defs/N", **EMAIL, "$defs": {"N": NAMED}})
    assert set(found["properties"]) == {"name", "email"}
    assert sorted(found["required"]) == ["email", "name"]


def test_a_schema_within_itself_comes_to_an_end() -> None:
    found = rewritten({"$ref": "#/$defs/Loop", "properties": {"x": S}, "$defs": DEFS})
    assert set(found["properties"]) == {"name", "next", "x"}
    names = [f"n{number}" for number in range(64)]
    bomb = {
        name: {"allOf": [{"$ref": f"#/$defs/{after}"}, {"$ref": f"#/$defs/{after}"}], **EMAIL}
        for name, after in pairwise(names)
    }
    assert rewritten({"$ref": "#/$defs/n0", **EMAIL, "$defs": {**bomb, names[-1]: NAMED}})


@pytest.mark.parametrize(
    "branches",
    [
        [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        [{"$ref": "#/$defs/A"}, {"type": "null"}],
        [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4}],
        [{"type": "number", "exclusiveMaximum": 3}, {"type": "integer", "minimum": 3}],
        [{"enum": [1, 2]}, {"const": True}, {"type": "string"}],
        [{"type": ["string", "null"]}, {"type": "array"}],
    ],
)
def test_one_of_branches_that_exclude_each_other_is_any_of_them(branches: list[Any]) -> None:
    assert set(rewritten({"oneOf": branches, "$defs": DEFS})) == {"anyOf", "$defs"}


@pytest.mark.parametrize(
    "branches",
    [
        [{"$ref": "#/$defs/A"}, {"type": "object"}],
        [{"type": "integer", "maximum": 3}, {"type": "number", "minimum": 3}],
        [{"enum": [1, 2]}, {"const": 2.0}],
        [{}, {"type": "null"}],
        [{"$ref": "#/$defs/Absent"}, {"type": "null"}],
    ],
)
def test_one_of_branches_that_overlap_stays(branches: list[Any]) -> None:
    assert "oneOf" in rewritten({"oneOf": branches, "$defs": DEFS})


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53 + 1},
        {"enum": ["a", {"b": [1234567890123456789]}]},
        {"properties": {"a": {"const": -(2**63) - 1}}},
        {"type": "integer", "minimum": 2**63},
        {"type": "number", "exclusiveMaximum": -1e300},
        {"type": "string", "pattern": "(?=a)a"},
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_place(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOption, match=r"(const|enum|m(in|ax)|exclu|pattern).* at #"):
        rewritten(schema)


@pytest.mark.parametrize("number", [2**53, -(2**53), 2**60, 0, 1, True])
def test_literals_that_a_double_holds_stay(number: int) -> None:
    assert rewritten({"const": number, "enum": [number]}) == {"const": number, "enum": [number]}


bounds = st.integers(-(2**66), 2**66) | st.sampled_from(
    [2**53 + 1, -(2**63), 2**63 - 1, 2**64, 2**64 - 1, 3.4e38, -3.4e38, 1e19]
)


@given(
    st.sampled_from(["integer", "number"]),
    st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    bounds,
)
def test_bounds_are_only_ever_narrowed(kind: str, word: str, bound: float) -> None:
    schema = {"type": kind, word: bound}
    try:
        found = rewritten(schema)
    except UnsupportedOption:
        assert abs(bound) >= 2**53 - 1
        return
    (edge,) = (value for name, value in found.items() if name != "type")
    assert int(float(edge)) == edge
    if found != schema:
        jsonschema.validate(edge, schema)


def test_of_two_bounds_the_narrower_counts() -> None:
    schema = {"type": "integer", "exclusiveMinimum": -(2**70), "minimum": 3, "maximum": 2**63}
    assert rewritten(schema) == {"type": "integer", "minimum": 3, "maximum": 2**63 - 1024}


YEARS = (0, 1, 4, 100, 400, 1900, 1996, 1999, 2000, 2024, 2025, 2100, 2400, 9999)
DAYS = [(month, day) for month in range(14) for day in range(33)]


def test_days_of_the_calendar_alone() -> None:
    pattern = rewritten({"type": "string", "format": "date"})["pattern"]
    check = jsonschema.Draft202012Validator({"pattern": pattern}).is_valid
    is_day = jsonschema.FormatChecker(["date"]).conforms
    days = [f"{year:04}-{month:02}-{day:02}" for year in YEARS for month, day in DAYS]
    assert [day for day in days if check(day)] == [day for day in days if is_day(day, "date")]
