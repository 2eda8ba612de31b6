"""JSON that no reader of lines may break."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from triptych.core.text.json_lines import escape_line_ends

LINE_ENDS = "\x85\u2028\u2029"


@given(st.recursive(st.text() | st.text(alphabet=LINE_ENDS + "a\u00c2\u20a8"), st.lists))
def test_a_document_is_one_line_and_the_same_value(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    escaped = escape_line_ends(text)
    assert json.loads(escaped) == json.loads(text)
    assert not any(end.encode() in escaped for end in LINE_ENDS)
    assert len(escaped.decode().splitlines()) == 1


def test_other_bytes_stay() -> None:
    assert escape_line_ends(b'{"a": "\xc2\xa0\xe2\x80\xa7"}') == b'{"a": "\xc2\xa0\xe2\x80\xa7"}'
