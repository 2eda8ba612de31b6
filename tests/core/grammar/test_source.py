"""What a schema, a pattern or a grammar of a caller becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.guided import VOCABULARY, ids_of
from triptych.core import limits
from triptych.core.errors import PayloadTooLarge
from triptych.core.grammar.compiler import GrammarCompiler
from triptych.core.grammar.constraint import Constraint
from triptych.core.grammar.source import to_grammar

COMPILER = GrammarCompiler(VOCABULARY)
A = {"properties": {"a": {"type": "integer"}}, "type": "object"}


def takes(schema: Any, text: str) -> bool:
    """Whether `text` is an answer to a schema."""
    matcher = COMPILER.compile(to_grammar("json_schema", json.dumps(schema)))
    ids = ids_of(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    "schema",
    [
        A,
        {"anyOf": [A]},
        {"$ref": "#/$defs/a", "$defs": {"a": A}},
        {"anyOf": [A, {"type": "null"}], "title": "properties"},
    ],
)
def test_answers_have_the_properties_that_are_named(schema: Any) -> None:
    assert takes(schema, '{"a": 1}')
    assert takes(schema, "{}")
    assert not takes(schema, '{"b": 1}')
    several = {"type": "array", "items": schema, "$defs": schema.get("$defs", {})}
    assert takes(several, '[{"a": 1}]')
    assert not takes(several, '[{"b": 1}]')


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object"}, '{"b": 1}'),
        (A | {"additionalProperties": True}, '{"a": 1, "b": 1}'),
        (A | {"patternProperties": {"^b$": {}}}, '{"a": 1, "b": 1}'),
        ({"allOf": [A, {"properties": {"b": {}}, "required": ["b"]}]}, '{"a": 1, "b": 1}'),
        (A | {"$ref": "#/$defs/b", "$defs": {"b": {"required": ["b"]}}}, '{"a": 1, "b": 1}'),
        ({"properties": {"properties": {"type": "object"}}}, '{"properties": {"b": 1}}'),
        ({"properties": {"a": {}}, "required": ["b"], "type": "object"}, '{"b": 1}'),
        ({"const": {"properties": {"b": 1}}}, '{"properties":{"b":1}}'),
    ],
)
def test_what_is_left_open_stays_open(schema: Any, text: str) -> None:
    assert takes(schema, text)


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ('{"a":1}', True),
        ('{"a": 1}', True),
        ('{\n  "a": 1\n}', True),
        ('{\n\t"a": 1\n}', True),
        ('{\n\n"a": 1}', False),
        ('{  "a": 1}', False),
        (' {"a":1}', False),
        ('{"a":1}\n', False),
    ],
)
def test_white_space_is_that_of_a_tidy_writer(text: str, is_taken: bool) -> None:
    assert takes(A, text) == is_taken


def test_properties_come_in_the_order_of_the_schema() -> None:
    schema = {"properties": {"b": {}, "a": {}}, "required": ["a", "b"], "type": "object"}
    assert takes(schema, '{"b":1,"a":2}')
    assert not takes(schema, '{"a":2,"b":1}')


def test_size_is_looked_at_first() -> None:
    Constraint("regex", "x" * limits.MAX_GRAMMAR_BYTES, "guided_regex").check_size()
    for text in ("x" * (limits.MAX_GRAMMAR_BYTES + 1), "é" * (limits.MAX_GRAMMAR_BYTES // 2 + 1)):
        with pytest.raises(PayloadTooLarge, match="guided_regex takes at most"):
            Constraint("regex", text, "guided_regex").check_size()
