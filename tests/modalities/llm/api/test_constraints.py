"""The form of an answer over HTTP: fields, errors, and what reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pydantic
import pytest

from support.guided import VOCABULARY
from support.http import FakeEngine, chat, refused
from triptych.core import limits
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.grammar.compiler import GrammarCompiler
from triptych.core.grammar.constraint import ANY_OBJECT
from triptych.core.grammar.source import to_grammar
from triptych.modalities.llm.api.constraints import ConstraintFields, constraint_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}, "required": ["b"]}


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "it", "schema": schema, **more},
        }
    }


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", ANY_OBJECT),
        (named(SCHEMA, strict=True), "json_schema", SCHEMA),
        (named(SCHEMA, strict=False, description="d"), "json_schema", SCHEMA),
        (named(None), "json_schema", ANY_OBJECT),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_schema", ANY_OBJECT),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a", "b"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "json_schema",
            SCHEMA,
        ),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema", SCHEMA),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"regex": "a+", "grammar": "", "ebnf": ""}, "regex", "a+"),
    ],
)
def test_every_way_to_ask(asked: dict[str, Any], kind: str, text: Any) -> None:
    constraint = constraint_of(asked)
    assert constraint is not None
    assert (constraint.kind, constraint.param) == (kind, next(iter(asked)))
    if isinstance(text, dict):  # the order of properties is that of the answer
        assert list(json.loads(constraint.text)["properties"]) == list(text["properties"])
        assert json.loads(constraint.text) == text
    else:
        assert constraint.text == text


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None},
        {"structured_outputs": {}},
        {"grammar": "", "ebnf": "", "regex": ""},
        {"structured_outputs": {"json_object": False, "disable_fallback": True}},
    ],
)
def test_what_asks_for_no_form(asked: dict[str, Any]) -> None:
    assert constraint_of(asked) is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "two"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "two"),
        (
            {"structured_outputs": {"regex": "a", "json_object": True}},
            "structured_outputs has two",
        ),
        ({"response_format": {"type": "json_schema"}}, "json_schema goes with"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "text with neither"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "json_schema goes with"),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {}}},
            "json_schema goes with",
        ),
        ({"regex": "a", "guided_regex": "a"}, "two"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "two"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "whitespace_pattern is not offered"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag is not offered"),
        ({"structured_outputs": {"yaml": "x"}}, "yaml"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_json": {"a": object()}}, "plain JSON"),
    ],
)
def test_what_cannot_be_meant(asked: dict[str, Any], said: str) -> None:
    with pytest.raises((InvalidRequest, UnsupportedOption), match=said):
        constraint_of(asked)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_engine_gets_a_grammar_for_every_sample(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    body = chat() if path == CHAT else {"model": "tiny", "prompt": ["hi", "ho"]}
    reply = await client.post(path, json={**body, "n": 2, "guided_regex": "[a-c]+"})
    assert reply.status_code == 200
    grammars = {request.grammar for request in engine.submitted.values()}
    (grammar,) = grammars
    assert len(engine.submitted) == (2 if path == CHAT else 4)
    matcher = GrammarCompiler(VOCABULARY).compile(grammar)
    assert not matcher.is_error()


async def test_without_a_form_nothing_is_checked(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await client.post(CHAT, json=chat(response_format={"type": "text"}))
    (request,) = engine.submitted.values()
    assert request.grammar == ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        (named({"uniqueItems": True}), "unsupported_option", "uniqueItems"),
        ({"guided_json": "{"}, "invalid_request", "not valid JSON"),
        ({"guided_regex": "("}, "invalid_request", "unclosed group"),
        (
            {"structured_outputs": {"grammar": "start: <|im_end|>"}},
            "unsupported_option",
            "Special tokens",
        ),
    ],
)
async def test_a_bad_form_is_a_400_before_anything_is_sent(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    asked: dict[str, Any],
    code: str,
    said: str,
    stream: bool,
) -> None:
    error = refused(await client.post(CHAT, json=chat(stream=stream, **asked)))
    assert (error["code"], error["param"]) == (code, next(iter(asked)))
    assert said in error["message"]
    assert not engine.submitted


async def test_a_large_schema_is_refused_by_its_size(client: httpx.AsyncClient) -> None:
    schema = {"enum": ["x" * 1000 for _ in range(limits.MAX_GRAMMAR_BYTES // 1000)]}
    error = refused(await client.post(CHAT, json=chat(**named(schema))), 413)
    assert error["param"] == "response_format"
    assert str(limits.MAX_GRAMMAR_BYTES) in error["message"]


def test_schemas_of_pydantic_are_taken() -> None:
    class Pet(pydantic.BaseModel):
        name: str
        kind: str = pydantic.Field(pattern="^(cat|dog)$")

    class Owner(pydantic.BaseModel):
        pets: list[Pet] = pydantic.Field(max_length=3)
        best: Pet | None

    constraint = constraint_of({"guided_json": Owner.model_json_schema()})
    assert constraint is not None
    assert isinstance(ConstraintFields(guided_json=Owner.model_json_schema()), ConstraintFields)
    grammar = to_grammar(constraint.kind, constraint.text)
    assert not GrammarCompiler(VOCABULARY).compile(grammar).is_error()
