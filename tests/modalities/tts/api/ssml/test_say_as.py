"""The words of texts of a given kind."""

from __future__ import annotations

import pytest

from triptych.core.errors import InvalidRequest
from triptych.modalities.tts.api.ssml.say_as import spoken_as
from triptych.modalities.tts.api.text.normalize import Normalizer


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("1,234", "cardinal", "one thousand two hundred thirty-four"),
        ("-5.5", "number", "minus five point five"),
        ("21st", "ordinal", "twenty-first"),
        ("0070", "digits", "zero zero seven zero"),
        ("ab-1", "spell-out", "A B dash one"),
        ("+1 (212) 555", "telephone", "plus one, two one two, five five five"),
        ("2:30pm", "time", "two thirty P M"),
        ("3/4/2024", "date", "March fourth, twenty twenty-four"),
        ("3/4/2024", "date:dmy", "April third, twenty twenty-four"),
        ("24-3-4", "date:ymd", "March fourth, twenty twenty-four"),
        ("4 march", "date:dm", "March fourth"),
        ("3.2024", "date:my", "March twenty twenty-four"),
        ("1905", "date:y", "nineteen oh five"),
        ("24", "date:d", "twenty-fourth"),
    ],
)
def test_the_words_of_a_kind(text: str, kind: str, words: str) -> None:
    name, _, form = kind.partition(":")
    assert Normalizer()(spoken_as(text, name, form)).text == words


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("1.2.3", "cardinal"),
        ("first", "ordinal"),
        ("12a", "digits"),
        ("☃", "characters"),
        ("FLOWERS", "telephone"),
        ("noon", "time"),
        ("12:60", "time"),
        ("13 pm", "time"),
        ("soon", "date"),
        ("32/1", "date:dm"),
        ("1/13", "date:dm"),
        ("0310/1", "date:dm"),
        ("1/2/3", "date:dm"),
        ("1/2/345", "date:dmy"),
    ],
)
def test_other_texts_are_refused(text: str, kind: str) -> None:
    name, _, form = kind.partition(":")
    with pytest.raises(InvalidRequest, match=f"cannot be read as {name}"):
        spoken_as(text, name, form)
