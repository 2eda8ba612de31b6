"""From tokens to words: where they end, what sticks to them, how long they last."""

from __future__ import annotations

import pytest
from transformers.models.whisper import tokenization_whisper

from support.asr import tokenizer
from triptych.modalities.asr.api.words import words_of
from triptych.modalities.asr.languages import LANGUAGES, language_code
from triptych.modalities.asr.wire import TranscriptToken

TOKENIZER = tokenizer()


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids))


def words(
    text: str, language: str = "en", *, step_s: float = 0.1
) -> list[tuple[str, float, float]]:
    """Words of `text`, whose tokens are its bytes, each `step_s` long."""
    tokens = [
        TranscriptToken(byte, n * step_s, (n + 1) * step_s) for n, byte in enumerate(text.encode())
    ]
    found = words_of(tokens, decode, language)
    return [(word.text, round(word.start_s, 3), round(word.end_s, 3)) for word in found]


def test_words_end_at_spaces() -> None:
    assert words(" ab c") == [(" ab", 0.0, 0.3), (" c", 0.3, 0.5)]


def test_marks_stick_to_their_words_and_leave_them_their_times() -> None:
    assert [word for word, *_ in words(' He said "no!", (twice).')] == [
        " He",
        " said",
        ' "no!",',
        " (twice).",
    ]
    assert words(" ab, c")[0] == (" ab,", 0.0, 0.3)


def test_a_character_in_several_tokens_is_whole() -> None:
    assert [word for word, *_ in words(" naïve été")] == [" naïve", " été"]


def test_unspaced_languages_count_characters() -> None:
    assert [word for word, *_ in words("你好", "zh")] == ["你", "好"]


def test_a_character_that_is_never_finished_is_left_out() -> None:
    assert words_of([TranscriptToken(0xE4, 0.0, 1.0)], decode, "zh") == ()


def test_no_words_in_nothing() -> None:
    assert words_of([], decode, "en") == ()


def test_pauses_next_to_a_sentence_belong_to_no_word() -> None:
    tokens = [
        TranscriptToken(ord("A"), 0.0, 5.0),
        TranscriptToken(ord(" "), 5.0, 5.2),
        TranscriptToken(ord("b"), 5.2, 5.4),
        TranscriptToken(ord(" "), 5.4, 5.4),
        TranscriptToken(ord("c"), 5.4, 9.4),
        TranscriptToken(ord("."), 9.4, 9.5),
    ]
    first, middle, last = words_of(tokens, decode, "en")
    assert first.end_s == 5.0
    assert first.end_s - first.start_s == pytest.approx(1.4)
    assert (middle.start_s, middle.end_s) == (5.0, 5.4)
    assert last.start_s == 5.4
    assert last.end_s - last.start_s == pytest.approx(1.4)


@pytest.mark.parametrize(
    ("given", "code"), [("en", "en"), (" German ", "de"), ("YUE", "yue"), ("", ""), ("xx", "")]
)
def test_languages_go_by_code_or_name(given: str, code: str) -> None:
    assert language_code(given) == code


def test_languages_are_those_of_the_reference() -> None:
    assert dict(LANGUAGES) == tokenization_whisper.LANGUAGES
