"""Formats: `strict` refuses those that say nothing here."""

from __future__ import annotations

import re
from typing import Any

import pytest

from triptych.core.errors import UnsupportedOption
from triptych.core.grammar.formats import check_formats

UNKNOWN = {"format": "no-such"}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (UNKNOWN, "#"),
        ({"items": [{}, UNKNOWN]}, "#/items/1"),
        ({"items": UNKNOWN}, "#/items"),
        ({"additionalItems": UNKNOWN}, "#/additionalItems"),
        ({"properties": {"a/b": UNKNOWN}}, "#/properties/a~1b"),
        ({"properties": {"default": UNKNOWN}}, "#/properties/default"),
        ({"anyOf": [{"$defs": {"enum": UNKNOWN}}]}, "#/anyOf/0/$defs/enum"),
    ],
)
def test_unknown_formats_are_refused_with_their_place(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(UnsupportedOption, match=rf"no-such at {re.escape(place)} cannot"):
        check_formats(schema, "tools")


def test_formats_that_are_known_or_go_with_a_pattern_are_taken() -> None:
    check_formats({"items": {"format": "no-such", "pattern": "a"}}, "tools")
    check_formats({"items": {"format": "date"}}, "tools")


@pytest.mark.parametrize(
    "schema",
    [
        *({word: {"format": "png"}} for word in ("const", "default", "example")),
        *({word: [{"format": "png"}]} for word in ("enum", "examples")),
        {"properties": {"format": {"type": "string"}}, "required": ["format"]},
    ],
)
def test_a_value_with_a_format_is_no_schema(schema: dict[str, Any]) -> None:
    check_formats({"properties": {"file": schema}}, "tools")
