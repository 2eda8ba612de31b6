"""JSON of calls that is mended while it is written."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from triptych.modalities.llm.api.tools.json_mending import JsonMender

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
objects = st.dictionaries(st.text(), values, max_size=4)


def mended(text: str) -> str | None:
    mender, found = JsonMender(), ""
    for char in text:
        piece = mender.push(char)
        if piece is None:
            return None
        found += piece
    return found if mender.is_done else None


@given(objects, st.sampled_from([None, 1]), st.booleans())
def test_valid_json_stays_as_it_is(value: Any, indent: int | None, escapes: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=escapes)
    assert mended(text) == text


@given(st.text(alphabet='{}[]",:\\ TrueFalsNo0.-e\n\t', max_size=30))
def test_what_comes_out_is_json(text: str) -> None:
    found = mended("{" + text)
    if found is not None:
        json.loads(found)


@given(st.text(alphabet="ab \n\t\r\x00\x1f"), st.text(alphabet="ab \n"))
def test_raw_control_characters_mean_themselves(value: str, key: str) -> None:
    assert json.loads(mended(f'{{"{key}": "{value}"}}') or "") == {key: value}


WORDS = {"True": True, "False": False, "None": None, "1": 1, '"a"': "a"}


@given(st.lists(st.sampled_from(sorted(WORDS)), min_size=1))
def test_words_of_python_and_trailing_commas(words: list[str]) -> None:
    expected = [WORDS[word] for word in words]
    assert json.loads(mended(f'{{"a": [{", ".join(words)}, ]}}') or "") == {"a": expected}


HALVES = st.sampled_from(["\\ud83d", "\\uDE00", "\\ud83d\\ude00", "a", "\\\\", "\\n", '\\"', "u"])


@given(st.lists(HALVES), st.lists(HALVES))
def test_half_a_pair_of_surrogates_is_a_missing_character(
    keys: list[str], values: list[str]
) -> None:
    text = f'{{"{"".join(keys)}": "{"".join(values)}"}}'
    (meant,) = json.loads(text).items()
    found = json.loads(mended(text) or "")
    ((key, value),) = found.items()
    assert [key, value] == [_without_halves(part) for part in meant]


def _without_halves(text: str) -> str:
    return "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in text)


def test_quotation_marks_in_a_string() -> None:
    for inner in ('say "hi" now', '"quoted" at first', 'a "b" "c" d', 'two "" marks'):
        assert json.loads(mended(f'{{"a": "{inner}", "b": 1}}') or "") == {"a": inner, "b": 1}


def test_what_is_broken_beyond_the_rules() -> None:
    for text in ('{"a": oops}', "{a: 1}", "{'a': 1}", '{"a" 1}', '{"a": 1 "b": 2}', '{"a": Tru}'):
        assert mended(text) is None
