"""Words that two passes agree on."""

from __future__ import annotations

import pytest

from triptych.modalities.talk.hearing.agreement import SettledText, agreed


@pytest.mark.parametrize(
    ("before", "after", "language", "expected"),
    [
        ("", "how are", "en", ""),
        ("how are", "how are you", "en", "how are"),
        ("how are,", "how are you", "en", "how"),
        ("ich bin", "du bist", "de", ""),
        ("你好吗", "你好呀", "zh", "你好"),
    ],
)
def test_the_common_beginning(before: str, after: str, language: str, expected: str) -> None:
    assert agreed(before, after, language) == expected


def test_what_was_said_is_never_taken_back() -> None:
    text = SettledText()
    passes = ["one two", "one two three", "one too three", "one too three four"]
    assert [text.take(each, "en") for each in passes] == ["", "one two", "", ""]
    assert text.end("one too three four") == ""
    assert text.said == "one two"


def test_frozen_text_stays_in_front() -> None:
    text = SettledText()
    text.take("one two", "en")
    assert text.take("one two three", "en") == "one two"
    text.freeze("one two")
    assert text.take(" three four", "en") == " three"
    assert text.end("one two three four") == " four"
