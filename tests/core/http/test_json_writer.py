"""The JSON of long answers: what pydantic writes, in stretches."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, RootModel, computed_field, field_serializer
from pydantic_core import PydanticSerializationError

from triptych.core.http.json_writer import json_stretches, write_json


class Token(BaseModel):
    """An entry of many."""

    text: str
    data: list[int] = []
    logprob: float | None = None


class Told(BaseModel):
    """An answer with all that answers have."""

    id: str = "a"
    tokens: list[Token] = []
    by_name: list[dict[str, Token | float] | None] = []
    first: Token | None = None
    rest: Any = None


def token(number: int) -> Token:
    """Some of which have no fields but one."""
    return Token(text=f'"{number}"é') if number % 3 else Token(text="", data=[1], logprob=-1e-9)


class Renamed(BaseModel):
    """Fields by other names, and some that are not written."""

    model_config = ConfigDict(extra="allow")

    schema_: str = Field(default="", alias="schema")
    secret: str = Field(default="", exclude=True)


class Made(BaseModel):
    """More and other than its fields."""

    number: int = 1

    @field_serializer("number")
    def _in_words(self, number: int) -> str:
        return f"number {number}"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return 2 * self.number


Several = RootModel[list[int]]
UNUSUAL: list[Any] = [
    Renamed(schema="a", secret="b", more=[1]),
    Made(number=2),
    Several([1, 2]),
    {2: "a", None: "b", True: "c", 0.5: {}, "": ()},
    [math.inf, -math.inf, math.nan, -0.0, 5e-324, 10**40, -(10**400)],
    b"bytes",
    {"a": {"b": []}, "c": {}},
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=70) | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=90,
)


@settings(max_examples=30)
@given(st.sampled_from([0, 1, 64, 65, 130]), VALUES)
def test_it_is_what_pydantic_writes(num_tokens: int, value: Any) -> None:
    tokens = [token(number) for number in range(num_tokens)]
    answers: list[BaseModel] = [
        Told(),
        Told(rest=value),
        Told(tokens=tokens, by_name=[None, {"é": token(0)}, *[{"b": 0.5}] * num_tokens]),
        Told(first=token(1), rest=[tokens, {"tokens": tokens}]),
    ]
    for answer in answers:
        assert write_json(answer).decode() == answer.model_dump_json(exclude_unset=True)


@pytest.mark.parametrize("num_values", [1, 100])
@pytest.mark.parametrize("value", UNUSUAL, ids=repr)
def test_unusual_values_are_written_as_pydantic_writes_them(value: Any, num_values: int) -> None:
    answer = Told(rest=[value] * num_values)
    assert write_json(answer).decode() == answer.model_dump_json(exclude_unset=True)


@pytest.mark.parametrize("value", ["\ud800", b"\xff", {"\udfff": 1}, object()])
def test_what_pydantic_cannot_write_is_an_error(value: Any) -> None:
    for write in (write_json, lambda answer: answer.model_dump_json(exclude_unset=True)):
        with pytest.raises((PydanticSerializationError, UnicodeEncodeError)):
            write(Told(rest=value))


@pytest.mark.parametrize("num_tokens", [1_000, 10_000])
def test_no_stretch_grows_with_the_answer(num_tokens: int) -> None:
    """Other threads run between them."""
    nested = {"more": [token(number) for number in range(num_tokens)]}
    answer = Told(tokens=[token(number) for number in range(num_tokens)], rest=Told(rest=nested))
    assert max(map(len, json_stretches(answer))) < 5_000
