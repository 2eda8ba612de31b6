"""The HTTP interface is frozen, and everything a caller may send is bounded.

Where a change is meant, run `PYTHONPATH=tests python tests/contract/test_openapi.py` and commit
the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.http import FakeEngine
from triptych.compose import build_app
from triptych.core.options.config import Config

SNAPSHOT = Path(__file__).with_name("openapi.json")
BOUNDS: dict[str | None, set[str]] = {
    "number": {"minimum", "maximum"},
    "integer": {"minimum", "maximum"},
    "string": {"maxLength"},
    "array": {"maxItems"},
}
_BOUNDED_LATER = ("binary", "json-schema", "json-object", "json-value")
"""A file and an object of a client's are bounded with their body, a schema when it is written."""
# Words for people, and what follows the version of the libraries that write the document.
_LEFT_OUT = {"title", "summary", "operationId", "openapi"}


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document of the whole app; which models there are makes no difference."""
    return build_app(Config(), (), FakeEngine()).openapi()


def surface() -> str:
    """What is frozen of it."""
    whole = document()
    frozen = {"paths": whole["paths"], "schemas": whole["components"]["schemas"]}
    return json.dumps(_without_words(frozen), indent=1, sort_keys=True) + "\n"


def _without_words(node: Any, *, is_names: bool = False) -> Any:
    if isinstance(node, list):
        return [_without_words(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_words(value, is_names=key in ("properties", "schemas", "paths"))
        for key, value in node.items()
        if is_names or key not in _LEFT_OUT
    }


def test_interface_is_as_recorded() -> None:
    assert surface() == SNAPSHOT.read_text(encoding="utf-8")


def test_no_list_is_one_of_nothing() -> None:
    """A field that is called as a type hides it from the annotations next to it."""
    parts: list[tuple[str, Any]] = list(document()["components"]["schemas"].items())
    for name, part in parts:
        if isinstance(part, dict):
            assert part.get("items") != {"type": "null"}, f"{name} has a list of nulls"
            parts += [(f"{name}.{word}", value) for word, value in part.items()]
        elif isinstance(part, list):
            parts += [(name, value) for value in part]


def inputs(whole: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema a caller's input is checked against, with where it stands."""
    for path, methods in whole["paths"].items():
        for method, operation in methods.items():
            for parameter in operation.get("parameters", ()):
                yield f"{method} {path} {parameter['name']}", parameter["schema"]
            for kind, content in operation.get("requestBody", {}).get("content", {}).items():
                yield f"{method} {path} {kind}", content["schema"]


def unbounded(whole: dict[str, Any], where: str, schema: dict[str, Any]) -> Iterator[str]:
    """The places in `schema` without a bound."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        yield from unbounded(whole, f"{where}:{name}", whole["components"]["schemas"][name])
        return
    for word in ("anyOf", "oneOf", "allOf"):
        for index, part in enumerate(schema.get(word, ())):
            yield from unbounded(whole, f"{where}/{index}", part)
    if "enum" in schema or "const" in schema or schema.get("format") in _BOUNDED_LATER:
        return
    kind = schema.get("type")
    if kind == "array":
        yield from unbounded(whole, f"{where}[]", schema["items"])
    elif kind == "object":
        yield from _unbounded_object(whole, where, schema)
    elif kind is None and not schema.keys() & {"anyOf", "oneOf", "allOf"}:
        yield f"{where}: anything goes"
    bounds = {word.replace("exclusiveM", "m") for word in schema}
    if not BOUNDS.get(kind, set()) <= bounds:
        yield f"{where}: {kind}"


def _unbounded_object(whole: dict[str, Any], where: str, schema: dict[str, Any]) -> Iterator[str]:
    rest = schema.get("additionalProperties", True)
    for pattern, part in schema.get("patternProperties", {}).items():
        if not pattern.endswith("$") or set("*+") & set(pattern):
            yield f"{where}: names of any length"
        rest = part
    if rest is True:
        yield f"{where}: unknown fields"
    elif rest is not False:
        if "maxProperties" not in schema:
            yield f"{where}: number of fields"
        yield from unbounded(whole, f"{where}{{}}", rest)
        names = {"type": "string", **schema.get("propertyNames", {})}
        if "patternProperties" not in schema:
            yield from unbounded(whole, f"{where}<name>", names)
    for name, part in schema.get("properties", {}).items():
        yield from unbounded(whole, f"{where}.{name}", part)


def test_every_input_is_bounded() -> None:
    whole = document()
    seen = list(inputs(whole))
    assert {"post /v1/chat/completions application/json"} < {where for where, _ in seen}
    assert [place for where, schema in seen for place in unbounded(whole, where, schema)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "integer", "minimum": 0},
        {"type": "array", "maxItems": 3, "items": {"type": "number"}},
        {"type": "array", "items": {"const": 1}},
        {"type": "object", "properties": {}},
        {"type": "object", "additionalProperties": {"const": 1}, "maxProperties": 1},
        {"anyOf": [{"const": 1}, {"type": "string"}]},
        {},
    ],
)
def test_the_check_above_finds_what_is_unbounded(schema: dict[str, Any]) -> None:
    assert list(unbounded({}, "here", schema))


if __name__ == "__main__":
    SNAPSHOT.write_text(surface(), encoding="utf-8")
