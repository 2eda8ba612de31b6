import pytest

from triptych.modalities.tts.api.text.markup import strip_markup
from triptych.modalities.tts.api.text.normalize import Normalizer

SAY = Normalizer()
MANY = 100_000
TABLE = "| Year | Total |\n|:---|---:|\n| 2023 | 5 |\n| 2024 | 7 |"
CASES = [
    ("See [the guide](https://docs.example.org/a/b) now.", "See the guide now."),
    ("![a cat](cat.png)", "a cat"),
    ("[![logo](a.png)](http://b.org) here", "logo here"),
    ("A [ref][r].\n\n[r]: http://x.org", "A ref."),
    ("Done[^1].", "Done."),
    ("- [x] tea\n- [ ] milk", "tea. milk."),
    (TABLE, "Year, Total. twenty twenty-three, five. twenty twenty-four, seven."),
    ("Tom &amp; Jerry &mdash; it&#39;s fun", "Tom and Jerry — it's fun"),
    ("Use:\n```python\nprint\n```", "Use: print"),
    ("See <https://a.org> and <b>bold</b>.", "See a dot org and bold."),
    ("He said [sic] twice.", "He said (sic) twice."),
]


@pytest.mark.parametrize(("written", "spoken"), CASES)
def test_marks_are_read_as_a_person_would(written: str, spoken: str) -> None:
    assert SAY(written).text.rstrip(".") == spoken.rstrip(".")


@pytest.mark.parametrize("written", [written for written, _ in CASES])
def test_every_character_keeps_its_source(written: str) -> None:
    text, starts = strip_markup(written)
    assert len(starts) == len(text) + 1
    assert starts == sorted(starts)
    assert starts[-1] == len(written)
    assert SAY(written).source == (0, len(written))


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("<b>x</b>" * MANY, "x" * MANY),
        ("a" + "|" * MANY + "\n|-|-\n", "a.\n"),
        ("[a]: x\n" + "[" * MANY + "] [][]" * MANY, None),
        ("<!--" * MANY, "<!--" * MANY),
    ],
    ids=["tags", "cells", "references", "comments"],
)
def test_many_marks_take_as_long_as_each_of_them(written: str, plain: str | None) -> None:
    """In linear time this is over in a second or two, else it takes a minute or more."""
    text, starts = strip_markup(written)
    assert len(starts) == len(text) + 1
    assert plain is None or text == plain


def test_a_comment_without_an_end_nearby_is_text() -> None:
    long = f"<!--{'x' * 10_001}-->"
    assert strip_markup(f"a<!--{'x' * 10_000}-->b{long}<!---->c").text == f"ab{long}c"
