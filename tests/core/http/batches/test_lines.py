"""However a file is cut, its lines are the same; a line that is wrong says why."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.stored_app import PATH, chat_line
from triptych.core.http.batches.lines import Line, LineSplitter, read_line

_TEXT = st.lists(st.sampled_from([b"\n", b"\r\n", b"a", b"bc", b" ", b"defgh"]), max_size=40)


@given(parts=_TEXT, cuts=st.lists(st.integers(0, 80)), most=st.integers(1, 12))
def test_lines_are_the_same_however_the_file_is_cut(
    parts: list[bytes], cuts: list[int], most: int
) -> None:
    data = b"".join(parts)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    splitter = LineSplitter(most)
    found: list[Line] = []
    for start, end in itertools.pairwise(places):
        found += splitter.push(data[start:end])
    found += splitter.finish()
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    whole = [line.strip() if len(line) <= most else None for line in lines]
    assert found == [(n, line) for n, line in enumerate(whole, start=1) if line != b""]


def read(given: Any, endpoint: Any = PATH) -> Any:
    return read_line(json.dumps(given).encode(), endpoint)


def test_a_line_is_posted_as_it_is() -> None:
    line = chat_line("a", temperature=0.5)
    found = read(line)
    assert found.error is None
    assert found.custom_id == "a"
    assert json.loads(found.body) == line["body"]
    other = {"custom_id": "b", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}
    assert json.loads(read(other, "/v1/embeddings").body) == {"input": "x"}


@pytest.mark.parametrize(
    ("line", "custom_id", "param"),
    [
        ("{", None, None),
        ("[]", None, None),
        ('{"a": 1, "a": 2}', None, "a"),
        ({"custom_id": "a"}, "a", "method"),
        ({**chat_line("a"), "more": 1}, "a", "more"),
        ({**chat_line("a"), "url": "/v1/completions"}, "a", "url"),
        ({**chat_line("a"), "url": "/metrics"}, "a", "url"),
        ({**chat_line("a"), "method": "GET"}, "a", "method"),
        ({**chat_line("a"), "body": "text"}, "a", "body"),
        ({**chat_line("a"), "custom_id": 5}, None, "custom_id"),
        ({**chat_line("a"), "custom_id": ""}, "", "custom_id"),
        ({**chat_line("a"), "custom_id": "x" * 600}, None, "custom_id"),
        (chat_line("a", stream=True), "a", "stream"),
        (chat_line("a", background=True), "a", "background"),
    ],
)
def test_a_wrong_line_says_why(line: Any, custom_id: str | None, param: str | None) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    found = read_line(text.encode(), PATH)
    assert found.error is not None
    assert found.error.status == 400
    assert found.error.param == param
    assert found.custom_id == custom_id


def test_a_line_that_is_too_long_says_so() -> None:
    error = read_line(None, PATH).error
    assert error is not None
    assert error.status == 413
