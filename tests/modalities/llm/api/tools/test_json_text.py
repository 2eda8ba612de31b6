"""JSON while it is being written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.modalities.llm.api.tools.json_scanner import MAX_DEPTH, JsonScanner

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


def accepted(text: str) -> tuple[int, bool]:
    """How many characters can belong to a value, and whether that value is complete."""
    scanner = JsonScanner()
    for index, char in enumerate(text):
        if not scanner.push(char):
            return index, False
    return len(text), scanner.finish()


@given(values, st.sampled_from([None, 1]), st.booleans())
def test_every_value_is_accepted_to_its_end(value: Any, indent: int | None, escapes: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=escapes)
    assert accepted(text) == (len(text), True)


@given(st.text(alphabet='{}[]",:\\u0a1.-+eEtrufalsn \n٢', max_size=24))
def test_what_is_accepted_is_what_the_library_reads(text: str) -> None:
    try:
        json.loads(text)
        is_valid = True
    except ValueError:
        is_valid = False
    num_accepted, is_complete = accepted(text)
    assert (num_accepted == len(text) and is_complete) == is_valid


@given(st.text(alphabet="-+.eE019٢²", max_size=7))
def test_numbers_are_those_that_the_library_reads(text: str) -> None:
    try:
        is_valid = isinstance(json.loads(text), int | float)
    except ValueError:
        is_valid = False
    assert (accepted(text) == (len(text), True)) == is_valid


@given(values, st.data())
def test_every_beginning_of_a_value_is_accepted(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value)
    end = data.draw(st.integers(0, len(text)))
    assert accepted(text[:end])[0] == end


@pytest.mark.parametrize("text", ["[1,]", '{"a"}', '{"a":1,}', "01", "1.e5", "tru]", '"\t"', "{,"])
def test_what_no_value_begins_with_is_refused(text: str) -> None:
    assert accepted(text + " ")[1] is False


def test_nesting_is_bounded() -> None:
    assert accepted("[" * MAX_DEPTH)[0] == MAX_DEPTH
    assert accepted("[" * (MAX_DEPTH + 1))[0] == MAX_DEPTH
