"""The words of speech as the cues of a caption file."""

from __future__ import annotations

import pytest

from triptych.modalities.tts.api.captions import caption_file
from triptych.modalities.tts.api.results import SpokenWord


def words(text: str, step_s: float = 0.5, gap_after: str = "") -> list[SpokenWord]:
    """The words of a text, one after another, with a pause of a second after one."""
    found, at_s = [], 0.0
    for word in text.split():
        found.append(SpokenWord(text=word, start_s=at_s, end_s=at_s + step_s, source=(0, 0)))
        at_s += step_s + (word == gap_after)
    return found


def test_a_cue_is_a_sentence() -> None:
    expected = "1\n00:00:00,000 --> 00:00:01,000\nHello, A&B.\n\n"
    expected += "2\n00:00:01,000 --> 00:00:01,500\nBye!\n\n"
    assert caption_file(words("Hello, A&B. Bye!"), "srt") == expected
    assert "A&amp;B" in caption_file(words("Hello, A&B. Bye!"), "vtt")
    assert caption_file([], "vtt") == "WEBVTT\n\n"


@pytest.mark.parametrize(
    ("spoken", "cues"),
    [
        (words("one two", gap_after="one"), ["one", "two"]),
        (words("one two three", step_s=3.0), ["one two", "three"]),
        (words("x" * 60 + " " + "y" * 30), ["x" * 60, "y" * 30]),
        (words("今日 は 晴れ ok です"), ["今日は晴れ ok です"]),
        (words("नमस्ते। हाँ"), ["नमस्ते।", "हाँ"]),
        (words('He said "no." Then'), ['He said "no."', "Then"]),
    ],
)
def test_a_cue_is_short_and_near(spoken: list[SpokenWord], cues: list[str]) -> None:
    lines = caption_file(spoken, "srt").split("\n")
    assert lines[2::4] == cues
