"""What JSON bodies have in common: nulls, fields that are refused, fields that are let pass."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated

import pytest
from pydantic import Field, ValidationError

from triptych.core.errors import UnsupportedOption
from triptych.core.http.fields import (
    INERT,
    IgnoresHints,
    NullIsAbsent,
    RefusedField,
    Strict,
    ignored_in,
    inert,
    type_of,
    unknown_type,
    without_refused,
)
from triptych.modalities.diffusion.api.protocol import GenerationBody
from triptych.modalities.embedding.api.routes import EmbeddingsRequest
from triptych.modalities.tts.api.protocol import SpeechBody


class Body(NullIsAbsent):
    needed: int
    count: Annotated[int, Field(ge=1)] = 2
    label: str | None = inert("user")


def test_null_is_absent_where_a_field_may_be() -> None:
    assert Body.model_validate({"needed": 1, "count": None}) == Body(needed=1)
    with pytest.raises(ValidationError, match="Field required"):
        Body.model_validate({"needed": None})
    with pytest.raises(ValidationError, match="Extra inputs"):
        Body.model_validate({"needed": 1, "unknown": None})


class Hinted(IgnoresHints):
    ignored = MappingProxyType({"hint": "nothing reads it"})

    count: int = 0


class Outer(Strict):
    one: Hinted | None = None
    many: Annotated[list[Hinted] | None, Field(max_length=3)] = None
    hint: str = ""


@pytest.mark.parametrize(
    ("model", "value", "paths"),
    [
        (Hinted, {"hint": 1, "count": 2}, ["hint"]),
        (Hinted, {"hint": None}, []),
        (Hinted, [{"hint": 1}], []),
        (Outer, {"hint": "read"}, []),
        (Outer, {"one": {"hint": 1}, "many": {}}, ["one.hint"]),
        (Outer, {"many": [{"hint": 1}, {"count": 1}, 3, {"hint": 0}]}, ["many.hint"] * 2),
        (Annotated[Body | Hinted, Field()], {"hint": 1}, ["hint"]),
    ],
)
def test_ignored_fields_are_found_by_their_paths(
    model: object, value: object, paths: list[str]
) -> None:
    assert list(ignored_in(model, value)) == paths


def test_the_schema_says_so() -> None:
    fields = Body.model_json_schema()["properties"]
    assert fields["needed"]["type"] == "integer"
    assert fields["count"]["anyOf"] == [{"type": "integer", "minimum": 1}, {"type": "null"}]
    assert fields["count"]["default"] == 2
    assert [part["type"] for part in fields["label"]["anyOf"]] == ["string", "null"]
    assert INERT["user"] in fields["label"]["description"]


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (GenerationBody, {"prompt": "a"}),
        (SpeechBody, {"model": "m", "input": "a"}),
        (EmbeddingsRequest, {"model": "m", "input": "a"}),
    ],
)
def test_clients_may_send_null_for_what_they_leave_out(
    model: type[NullIsAbsent], body: dict[str, str]
) -> None:
    optional = model.model_fields.keys() - body.keys()
    assert model.model_validate({**body, **dict.fromkeys(optional)}) == model.model_validate(body)
    schema = model.model_json_schema()["properties"]
    for name in optional & schema.keys():
        assert {"type": "null"} in schema[name]["anyOf"]


def test_refused_fields_pass_where_they_ask_for_nothing() -> None:
    table = {"x": RefusedField("use y.", (0,))}
    assert without_refused({"x": 0, "z": 1}, table) == {"z": 1}
    assert without_refused({"x": None}, table) == {}
    with pytest.raises(UnsupportedOption, match="x is not offered: use y"):
        without_refused({"x": 1}, table)


class Typed(NullIsAbsent):
    type: str = "text"


@pytest.mark.parametrize(
    ("value", "kind", "unknown"),
    [
        ({"type": "text"}, "text", ""),
        ({"type": "\u00e9" + "x" * 90}, "\u00e9" + "x" * 90, "'\\xe9" + "x" * 39 + "'"),
        ({"type": 5}, "", ""),
        ({"type": None}, "", ""),
        ({"text": "hi"}, "", ""),
        (Typed(), "text", ""),
        (Typed(type="video"), "video", "'video'"),
        ("text", "", ""),
        (None, "", ""),
        ([{"type": "video"}], "", ""),
    ],
)
def test_the_type_of_an_object_is_read_from_anything(
    value: object, kind: str, unknown: str
) -> None:
    assert type_of(value) == kind
    assert unknown_type(value, "text") == unknown
