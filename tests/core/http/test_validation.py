"""An unknown field of a body gets the name that it resembles, at its place."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Discriminator, Tag, ValidationError

from triptych.core.http.errors import to_public
from triptych.core.http.fields import JsonObject, Strict
from triptych.core.http.validation import invalid_body


class Text(Strict):
    type: Literal["text"] = "text"
    content: str


class Picture(Strict):
    type: Literal["picture"] = "picture"
    url: str
    detail: str = ""


Part = Annotated[
    Annotated[Text, Tag(":text")] | Annotated[Picture, Tag(":picture")],
    Discriminator(lambda value: f":{value.get('type')}"),
]


class Body(Strict):
    temperature: float = 1.0
    max_tokens: int = 1
    parts: list[Part] | None = None
    inner: Picture | None = None
    options: JsonObject | None = None


def message(body: dict[str, Any]) -> str:
    try:
        Body.model_validate(body)
    except ValidationError as error:
        return to_public(invalid_body(Body, error)).message
    raise AssertionError("valid")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"temprature": 1}, "Unknown field: temprature; did you mean temperature?"),
        ({"maxTokens": 1}, "Unknown field: maxTokens; did you mean max_tokens?"),
        ({"max_token": 1}, "Unknown field: max_token; did you mean max_tokens?"),
        ({"url": "x"}, "Unknown field: url."),
        ({"colour": "red"}, "Unknown field: colour."),
        ({"inner": {"url": "x", "detial": "low"}}, "inner.detial; did you mean detail?"),
        ({"inner": {"url": "x", "temprature": 1}}, "Unknown field: inner.temprature."),
        (
            {"parts": [{"type": "text", "content": "a", "contnet": "b"}]},
            "Unknown field: parts[0].contnet; did you mean content?",
        ),
        ({"t" * 10_000: 1}, "Unknown field: ttt"),
    ],
)
def test_an_unknown_field_gets_the_nearest_name(body: dict[str, Any], expected: str) -> None:
    assert expected in message(body)


def test_only_the_first_of_many_unknown_fields_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[str] = []
    place = "triptych.core.http.validation.nearest"
    monkeypatch.setattr(place, lambda word, _: compared.append(word))
    message({f"field_{i}": i for i in range(100)})
    assert compared == ["field_0"]
