"""Refusals name the place of their cause in the caller's schema, however deep it lies."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.guided import COMPILER
from triptych.core.errors import RequestError
from triptych.core.grammar import causes
from triptych.core.grammar.causes import _MAX_CHARS, _MAX_TRIES, _replace, _Search, locate_cause
from triptych.core.grammar.document import Path, pointer
from triptych.core.grammar.source import to_grammar

S = {"type": "string"}
NONE = {"type": "integer", "minimum": 5, "maximum": 3}
TWICE = {"type": "object", "patternProperties": {"^a": S, "a$": S}}
DIGITS = {"type": "number", "multipleOf": 2**40}
HERE = "https://example.com/a"


def refused(schema: Any) -> RequestError:
    """The refusal of a schema, which nothing but the library finds fault with."""
    text = json.dumps(schema)
    assert COMPILER.complaint(to_grammar("json_schema", text))
    with pytest.MonkeyPatch.context() as patch:  # a busy machine must not end the search early
        patch.setattr(causes, "_MAX_SEARCH_S", math.inf)
        error = locate_cause(COMPILER, text, 0.0)
    assert error is not None
    return error


def place(error: RequestError) -> str:
    return error.message.rpartition(" The cause is at ")[2].removesuffix(".")


def named(name: str, part: Any, **more: Any) -> dict[str, Any]:
    """An object in which `part` must hold for a property."""
    properties = {"first": S, name: part, "last": {"type": "integer"}}
    return {"type": "object", "properties": properties, "required": [name], **more}


@pytest.mark.parametrize(
    ("schema", "at"),
    [
        (NONE, "#"),
        (named("a", NONE), "#/properties/a"),
        (named("a", False), "#/properties/a"),
        (named("a", named("b/c~", NONE)), "#/properties/a/properties/b~1c~0"),
        (named("a", {"$ref": "#/$defs/x"}, **{"$defs": {"x": named("b", NONE)}}), "#/$defs/x/.*b"),
        (named("a", {"anyOf": [NONE, NONE]}), "#/properties/a/anyOf"),
        (named("a", {"anyOf": [S, TWICE]}), "#/properties/a/anyOf/1"),
        (named("a", {"oneOf": [S, DIGITS]}), "#/properties/a/oneOf/1"),
        (named("a", {"oneOf": [NONE, {"enum": []}]}), "#/properties/a/oneOf"),
        (named("a", {"allOf": [S, NONE]}), "#/properties/a/allOf/1"),
        (named("a", {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 3}]}), "#/.*/a"),
        (named("a", {"type": "string", "allOf": [{"type": "integer"}]}), "#/properties/a"),
        ({"type": "array", "items": NONE, "minItems": 1}, "#/items"),
        ({"type": "array", "items": False, "minItems": 1}, "#"),
        ({"type": "array", "prefixItems": [S, named("a", NONE)], "minItems": 2}, "#/p.*/1/p.*/a"),
        ({"type": "array", "items": [S, DIGITS]}, "#/items/1"),
        ({"type": "object", "additionalProperties": DIGITS}, "#/additionalProperties"),
        ({"type": "object", "required": ["x"], "additionalProperties": False}, "#"),
        ({"properties": {"a": {"type": "strin"}}}, "#/properties/a"),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, "#/properties/a"),
        ({"properties": {"a": {"type": "string", "minLength": -1}}}, "#/properties/a"),
        ({"properties": {"a": named("b", S, minProperties=2)}}, "#/properties/a"),
        ({"$id": HERE, "items": {"$ref": "b.json"}}, "#/items/$ref"),
        ({"$id": HERE, "properties": {"a": S, "b": {"$ref": "#no"}}}, "#/properties/b/$ref"),
        ({"$id": HERE, "items": {"$ref": "#/$defs/x"}, "$defs": {"x": DIGITS}}, "#/$defs/x"),
        ({"$ref": "#"}, "#/$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "#/$defs/a/$ref"),
        (named("a", S, patternProperties={"^a": {"type": "integer"}}), "#"),
        (named("a", S, allOf=[named("a", {"type": "integer"})]), "#"),
    ],
)
def test_the_place_is_that_of_the_smallest_part_that_is_refused(schema: Any, at: str) -> None:
    assert re.fullmatch(at.replace("$", r"\$"), place(refused(schema)))


def test_what_is_said_is_about_that_part() -> None:
    error = refused({**named("a", named("b", NONE)), "minProperties": 1})
    assert "minimum (5) is greater than maximum (3). The cause is at #" in error.message


def test_a_part_that_need_not_hold_is_not_the_place() -> None:
    optional = {"type": "object", "properties": {"a": NONE, "b": DIGITS}}
    assert place(refused(optional)) == "#/properties/b"
    assert (
        place(refused({**optional, "properties": {"a": NONE, "b": NONE}, "required": ["b"]}))
        == "#/properties/b"
    )


def test_a_schema_that_can_be_followed_has_no_cause() -> None:
    assert locate_cause(COMPILER, json.dumps(named("a", S)), 0.0) is None
    assert locate_cause(COMPILER, "true", 0.0) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"p{n}": {"maxLength": n} for n in range(400)} | {"x": DIGITS}},
        {"anyOf": [*({"const": n} for n in range(400)), DIGITS]},
        {"allOf": [*({"minimum": n} for n in range(400)), {"enum": []}]},
    ],
)
def test_a_wide_schema_takes_a_few_tries(schema: dict[str, Any]) -> None:
    tries: list[str] = []

    def complaint(part: Any) -> str:
        tries.append("")
        return COMPILER.complaint(to_grammar("json_schema", json.dumps(part)))

    search = _Search(schema, complaint(schema), complaint, 0.0)
    search._ends_s = math.inf
    assert place(search.refusal()).endswith(("x", "/400"))
    assert len(tries) < 40


def test_a_search_ends_early_at_a_place_that_has_the_cause_in_it() -> None:
    """The longest that a search may take is that of a compiled grammar."""
    deep = NONE
    for _ in range(40):
        deep = named("n", deep)
    text = json.dumps(deep)
    reason = COMPILER.complaint(to_grammar("json_schema", text))
    for num_tries in range(12):
        tries: list[str] = []

        def complaint(part: Any, tries: list[str] = tries) -> str:
            tries.append("")
            return COMPILER.complaint(to_grammar("json_schema", json.dumps(part)))

        search = _Search(deep, reason, complaint, 0.0)
        search._ends_s, search._num_tries = math.inf, _MAX_TRIES - num_tries
        found = place(search.refusal())
        assert ("#" + "/properties/n" * 40).startswith(found)
        assert len(tries) == num_tries
    assert found != "#"
    search = _Search(deep, reason, lambda part: pytest.fail("a try"), math.inf)
    assert place(search.refusal()) == "#"


def test_large_and_slow_schemas_are_not_searched() -> None:
    text = json.dumps(named("a", NONE))
    assert locate_cause(COMPILER, text, 0.0) is not None
    assert locate_cause(COMPILER, text, 1.0) is None
    assert locate_cause(COMPILER, text + " " * _MAX_CHARS, 0.0) is None


def test_a_long_place_is_cut() -> None:
    error = refused(named("x" * 5000, NONE))
    assert len(error.message) < 400
    assert place(error).startswith("#/properties/xxx")


# Random hosts: each puts a part at a place of a schema that is followed without it.
names = st.text("abz/~ %", min_size=1, max_size=4)
fine = st.sampled_from([S, {"type": "integer"}, {"type": "null"}, {"const": 7}, {}, True])
Placed = tuple[Any, Path]


@st.composite
def hosted(draw: st.DrawFn, inner: Placed) -> Placed:
    """A schema whose answers need `inner`, and the path to the latter in it."""
    part, path = inner
    others = draw(st.lists(fine, max_size=3))
    at = draw(st.integers(0, len(others)))
    listed = [*others[:at], part, *others[at:]]
    match draw(st.sampled_from(["properties", "items", "prefixItems", "allOf", "list"])):
        case "properties":
            keys = draw(st.lists(names, min_size=len(listed), max_size=len(listed), unique=True))
            properties = dict(zip(keys, listed, strict=True))
            schema = {"type": "object", "properties": properties, "required": [keys[at]]}
            return schema, ("properties", keys[at], *path)
        case "items":
            return {"type": "array", "items": part, "minItems": 2}, ("items", *path)
        case "allOf":
            return {"allOf": [{}, part]}, ("allOf", 1, *path)
        case word:
            word = "items" if word == "list" else word
            return {"type": "array", word: listed, "minItems": len(listed)}, (word, at, *path)


@st.composite
def chosen(draw: st.DrawFn, inner: Placed) -> Placed:
    """A schema with `inner` where not every answer needs it."""
    part, path = inner
    match draw(st.sampled_from(["anyOf", "properties", "additionalProperties", "tagged"])):
        case "anyOf":
            return {"anyOf": [{"type": "null"}, part]}, ("anyOf", 1, *path)
        case "properties":
            return {"type": "object", "properties": {"o": part}}, ("properties", "o", *path)
        case "tagged":
            kinds = [
                named("k", {"const": 1}),
                named("k", {"const": 2}, properties={"k": {"const": 2}, "o": part}),
            ]
            return {"oneOf": kinds}, ("oneOf", 1, "properties", "o", *path)
        case word:
            return {"type": "object", word: part}, (word, *path)


def placed(parts: list[Any], *hosts: Any) -> st.SearchStrategy[Placed]:
    leaves = st.sampled_from(parts).map(lambda part: (part, ()))
    return st.recursive(
        leaves, lambda inner: st.one_of(*(inner.flatmap(host) for host in hosts)), max_leaves=6
    )


def check(schema: Any, path: Path, is_defined: bool) -> None:
    root, at = schema, pointer(path)
    if is_defined:
        root = named("r", {"$ref": "#/$defs/d"}, **{"$defs": {"d": schema}})
        at = pointer(("$defs", "d", *path))
    without = _replace(root, (*(("$defs", "d") if is_defined else ()), *path), S)
    assume(path and not COMPILER.complaint(to_grammar("json_schema", json.dumps(without))))
    assert place(refused(root)) == at


@settings(max_examples=150, deadline=None)
@given(
    placed([NONE, {"enum": []}, {"type": "string", "pattern": "^a$", "minLength": 2}], hosted),
    st.booleans(),
)
def test_a_part_that_nothing_fulfils_is_found_anywhere(found: Placed, is_defined: bool) -> None:
    check(*found, is_defined)


@settings(max_examples=150, deadline=None)
@given(
    placed([TWICE, DIGITS, {"type": "strin"}, {"type": "string", "pattern": "["}], hosted, chosen),
    st.booleans(),
)
def test_a_part_that_cannot_be_enforced_is_found_anywhere(found: Placed, is_defined: bool) -> None:
    check(*found, is_defined)
