"""Schemas of the standard, of zod and of Pydantic: nothing that is not valid is taken."""

from __future__ import annotations

import datetime
import json
import re
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, IPvAnyAddress, SecretStr

from support.guided import takes
from triptych.core.errors import InvalidRequest, RequestError, UnsupportedOption
from triptych.core.grammar.schemas import plain_schema

ZOD = json.loads((Path(__file__).parent / "zod_schemas.json").read_text())
S = {"type": "string"}
EMAIL = {"properties": {"email": S}, "required": ["email"]}
PHONE = {"properties": {"phone": S}, "required": ["phone"]}
NAMED = {"type": "object", "properties": {"name": S}}
ONE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
LIST = {"type": "array", "items": {"type": "integer"}}
TAGS = {
    tag: {"type": "object", "properties": {"k": {"const": tag}}, "required": ["k"]} for tag in "ab"
}
A, B = ({"$ref": f"#/$defs/{tag}"} for tag in "ab")


def is_valid(schema: Any, value: Any) -> bool:
    """The same by the standard, formats included."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(value)


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"const": 2**53}, [2**53, 2**53 + 1]),
        ({"enum": [2**62, -(2**62)]}, [2**62, 2**62 + 1, -(2**62)]),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, [-1, 0, 2**63 - 1, 2**63]),
        ({"type": "integer", "minimum": -(2**63)}, [0, -(2**63) - 1, 10**18]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64}, [0, 10**18, -1, 2**64 + 1]),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 9}, [2**53, 2**53 + 4]),
        ({"type": "number", "minimum": 0, "maximum": 1e19}, [0, 0.5, -1, 10**20]),
        ({"type": "integer", "maximum": 9, "minimum": 0, "default": 2**70}, [9, 10]),
        ({**NAMED, "anyOf": [EMAIL, PHONE]}, [{"name": "A", "email": "x"}, {"name": "A"}]),
        (
            {**NAMED, "required": ["name"], "anyOf": [EMAIL, PHONE]},
            [{"name": "A", "phone": "x"}, {"email": "x"}, {"name": "A", "email": "x"}],
        ),
        ({**NAMED, "allOf": [EMAIL]}, [{"name": "A", "email": "x"}, {"name": "A"}]),
        (
            {"$ref": "#/$defs/p", **NAMED, "required": ["name"], "$defs": {"p": PHONE}},
            [{"phone": "x", "name": "A"}, {"name": "A"}, {"phone": "x"}],
        ),
        ({"oneOf": [A, B], "$defs": TAGS}, [{"k": "a"}, {"k": "b"}, {"k": "c"}, {}]),
        ({"items": {"oneOf": [A, {"type": "null"}]}, "$defs": TAGS}, [[None], [{"k": "a"}], [1]]),
        (
            {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4}]},
            [3, 4, "x"],
        ),
        ({**ONE, "propertyNames": S, "not": False, "then": {}}, [{"a": 1}, {"a": 2}, {}]),
        ({**ONE, "unevaluatedProperties": True, "dependentRequired": {}}, [{"a": 1}, {}]),
        ({**LIST, "uniqueItems": False, "minContains": 2}, [[], [1, 1], ["x"]]),
        ({**LIST, "uniqueItems": True, "maxItems": 1}, [[], [1], [1, 1]]),
        ({**LIST, "contains": True, "minContains": 0}, [[], [1]]),
        ({"type": "integer", "minimum": 2, "exclusiveMinimum": 5}, [3, 5, 6]),
        ({"type": "number", "maximum": 5, "exclusiveMaximum": 5}, [4, 5]),
        ({"type": "integer", "maximum": 2**64, "exclusiveMaximum": 9}, [8, 9]),
        ({"type": "string", "maxLength": 2.0}, ["ab", "abc"]),
        (
            {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}]},
            ["ab", "abc", 1],
        ),
        ({"oneOf": [{**LIST, "maxItems": 1}, {**LIST, "minItems": 2}]}, [[], [1, 2], [1, "x"]]),
        ({"type": "object", "properties": {"n": {"not": {}}}}, [{}, {"n": 1}]),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, [{"x1": 1}, {"y": 1}, {}]),
        (
            {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": S},
            [{"a": "x"}, {"a": 1}, {"b": "x"}, {}],
        ),
        ({"type": "string", "format": "no-such"}, ["x", 1]),
        ({"type": ["string", "null"], "format": "date"}, ["2025-02-28", "2025-02-29", None]),
        ({"type": "string", "format": "date", "pattern": "^20"}, ["2024-02-29", "1999-01-01"]),
    ],
)
def test_what_is_taken_is_what_the_standard_allows(schema: Any, values: list[Any]) -> None:
    found = {json.dumps(value): takes(schema, value) for value in values}
    assert found == {json.dumps(value): is_valid(schema, value) for value in values}
    assert any(found.values())


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": 2**53 + 1}, "#/const holds 9007199254740993"),
        ({"properties": {"a": {"enum": [{"b": 2**63}]}}}, "#/properties/a/enum"),
        ({"type": "integer", "minimum": 2**64}, "#/minimum"),
        ({"type": "integer", "minimum": 10**400}, "#/minimum is 1000"),
        ({"exclusiveMaximum": -(10**400)}, "#/exclusiveMaximum is -1000"),
        ({"items": {"uniqueItems": True}}, "uniqueItems at #/items"),
        ({"type": "string", "minLength": 2**70}, "#/minLength"),
        ({"type": "string", "pattern": "^(?=a)"}, "#/pattern: look-ahead"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": S}}}, "not at #/\\$defs/a"),
        ({"type": "integer", "minimum": 2**63 - 1}, "#/minimum is 9223372036854775807"),
        ({"oneOf": [{"minimum": 2}, {"maximum": 2}]}, "oneOf at #/oneOf"),
        ({"items": {"oneOf": [{"minLength": 2}, True]}}, "oneOf at #/items/oneOf"),
        ({"oneOf": [{"type": "null"}, {"type": "array", "items": {"not": S}}]}, "#/oneOf/1/items"),
        ({"items": {"$dynamicRef": "#x"}}, "\\$dynamicRef at #/items"),
        ({"$schema": "https://example.com/mine"}, "#/\\$schema is https://example.com/mine"),
    ],
)
def test_what_cannot_be_enforced_is_named_with_its_place(schema: Any, place: str) -> None:
    with pytest.raises(UnsupportedOption, match=place):
        takes(schema, 1)


@pytest.mark.parametrize("reference", ["#/$defs/b", "#b", "https://example.com/s", "b.json"])
def test_a_reference_that_leads_nowhere_is_named_with_its_place(reference: str) -> None:
    schema = {"properties": {"a": {"$ref": reference}}, "$defs": {"a": S}}
    with pytest.raises(InvalidRequest, match=rf"#/properties/a/\$ref is {re.escape(reference)},"):
        takes(schema, {})


@pytest.mark.parametrize("name", ["a b", "é", 'a"b', "a%b", "a/b", "a~b", "Box[int]"])
def test_a_reference_finds_any_name(name: str) -> None:
    pointer = name.replace("~", "~0").replace("/", "~1")
    for reference in (quote(pointer), pointer.replace("%", "%25")):
        schema = {"$ref": f"#/$defs/{reference}", "$defs": {name: LIST, "other": {"not": S}}}
        assert takes(schema, [1])
        assert not takes(schema, ["x"])


@pytest.mark.parametrize("num_branches", [60, 400])
def test_a_wide_choice_is_taken(num_branches: int) -> None:
    tagged = {
        f"d{n}": {"type": "object", "properties": {"k": {"const": n}}, "required": ["k"]}
        for n in range(num_branches)
    }
    schema = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in tagged], "$defs": tagged}
    assert takes(schema, {"k": num_branches - 1})
    assert not takes(schema, {"k": num_branches})


@pytest.mark.parametrize("word", ["allOf", "oneOf"])
def test_references_that_multiply_are_refused_soon(word: str) -> None:
    each = {f"d{n}": {word: [{"$ref": f"#/$defs/d{n + 1}"}] * 2, **NAMED} for n in range(40)}
    with pytest.raises(RequestError):
        takes({"$ref": "#/$defs/d0", "required": [], **NAMED, "$defs": {**each, "d40": ONE}}, {})


@pytest.mark.parametrize(
    "part",
    [
        {"required": 1},
        {"properties": []},
        {"type": [{}]},
        {"oneOf": {}},
        {"maxLength": "2"},
        {"pattern": 1},
        {"items": 3},
    ],
)
def test_what_is_not_well_formed_is_refused_with_its_place(part: Any) -> None:
    schema = {"oneOf": [{"$ref": "#/x"}, part], "x": part}
    with pytest.raises(InvalidRequest, match=f"#/oneOf/1/{next(iter(part))}"):
        takes(schema, 1)
    with pytest.raises(InvalidRequest, match="not well-formed"):
        takes({"oneOf": [{"$ref": "#/x"}, S], "x": part}, 1)


@given(
    st.sampled_from(["integer", "number"]),
    st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    st.integers(-(2**66), 2**66) | st.floats(-1e300, 1e300),
)
def test_bounds_are_only_ever_narrowed(kind: str, word: str, bound: float) -> None:
    schema = {"type": kind, word: bound}
    try:
        found = plain_schema(schema)[word]
    except UnsupportedOption:
        assert abs(bound) >= (2**63 if kind == "integer" else 2**53)
        return
    assert found == bound if abs(bound) < 2**53 else abs(found) < 2**63
    assert found >= bound if "inimum" in word else found <= bound


@settings(max_examples=60, deadline=None)
@given(st.integers(2**52, 2**62), st.integers(-3, 3), st.sampled_from(["integer", "number"]))
def test_large_bounds_are_exact(bound: int, more: int, kind: str) -> None:
    for sign in (-1, 1):
        schema = {"type": kind, "maximum" if sign > 0 else "minimum": sign * bound}
        value = sign * (bound + more)
        assert not takes(schema, value) or is_valid(schema, value)


def test_days_are_those_of_the_calendar() -> None:
    days = [
        f"{y}-02-{d}" for y in ("0000", "0004", "1900", "2000", "2024", "2025") for d in (28, 29)
    ]
    days += ["2025-04-30", "2025-04-31", "2025-12-31", "2025-13-01", "2025-01-00"]
    for day in days:
        try:
            datetime.date.fromisoformat(day)
            is_day = True
        except ValueError:
            is_day = False
        assert takes({"type": "string", "format": "date"}, day) == is_day, day
        stamp = f"{day}T10:00:00Z"
        assert takes({"type": "string", "format": "date-time"}, stamp) == is_day, stamp


def test_a_host_name_has_253_characters_at_most() -> None:
    schema = {"type": "string", "format": "hostname"}
    name = ".".join(["a" * 49] * 5)
    assert takes(schema, f"{name}.abc")
    assert not takes(schema, f"{name}.abcd")


@pytest.mark.parametrize("name", ZOD)
def test_types_of_zod_are_taken(name: str) -> None:
    if name == "emoji":
        with pytest.raises(UnsupportedOption, match="look-ahead"):
            takes(ZOD[name], "")
    else:
        assert not takes(ZOD[name], {"no": ["such", "value"]}) or is_valid(
            ZOD[name], {"no": ["such", "value"]}
        )


class _Cat(BaseModel):
    kind: Literal["cat"] = "cat"


class _Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    pups: list[_Dog] = []


class _Everything(BaseModel):
    id: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
    path: Path
    secret: SecretStr
    data: bytes
    address: IPvAnyAddress | IPv4Address
    day: datetime.date | None
    pet: Annotated[_Cat | _Dog, Field(discriminator="kind")]


def test_a_model_of_pydantic_is_taken() -> None:
    value = {
        "id": 2**62,
        "path": "a/b",
        "secret": "x",
        "data": "y",
        "address": "10.0.0.1",
        "day": "2024-02-29",
        "pet": {"kind": "dog", "pups": [{"kind": "dog"}]},
    }
    schema = _Everything.model_json_schema()
    assert takes(schema, value)
    _Everything.model_validate(value)
    assert not takes(schema, {**value, "day": "2025-02-29"})
    assert not takes(schema, {**value, "pet": {"kind": "cow"}})


def test_tuples_of_older_drafts_are_taken() -> None:
    schema = {"type": "array", "items": [S, {"type": "null"}], "additionalItems": False}
    assert takes(schema, ["x", None])
    assert not takes(schema, [None, "x"])
    assert not takes(schema, ["x", None, 1])
    del schema["additionalItems"]
    assert takes(schema, ["x", None, 1])
