import pytest

from triptych.core.errors import InvalidRequest
from triptych.modalities.tts.api.text.guard import (
    check_spoken,
    check_text,
    estimate_seconds,
    expected_duration,
)
from triptych.modalities.tts.api.text.normalize import Normalizer

normalize = Normalizer()
SENTENCE = "The quick brown fox jumps over the lazy dog."


@pytest.mark.parametrize("text", ["", "   ", "\n\t\u3000"])
def test_empty_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="empty") as caught:
        check_text(text, 4096)
    assert caught.value.param == "input"


@pytest.mark.parametrize("text", ["😀", "🎉 ✨!", "...", "-- * --", "\u200b"])
def test_text_without_words_is_refused(text: str) -> None:
    check_text(text, 4096)
    with pytest.raises(InvalidRequest, match="no words"):
        check_spoken(normalize(text))


def test_endless_text_is_refused_with_the_limit() -> None:
    check_text("a" * 4096, 4096)
    with pytest.raises(InvalidRequest, match=r"100000 characters; at most 4096"):
        check_text("a" * 100_000, 4096)


@pytest.mark.parametrize("text", ["a", "5", "Hi 😀", "日本"])
def test_text_with_a_word_passes(text: str) -> None:
    check_text(text, 4096)
    check_spoken(normalize(text))


def test_expected_duration_brackets_a_natural_reading() -> None:
    expected = expected_duration(SENTENCE)  # read aloud in 2.4 to 3.5 s
    assert expected.least_s < 2.4
    assert 2.4 < expected.likely_s < 3.5
    assert 3.5 < expected.most_s < 12


def test_speed_and_phonemes_scale_the_duration() -> None:
    normal, fast = expected_duration(SENTENCE), expected_duration(SENTENCE, speed=2.0)
    assert fast.likely_s == pytest.approx(normal.likely_s / 2)
    by_phonemes = expected_duration(SENTENCE, num_phonemes=33)
    assert by_phonemes.likely_s == pytest.approx(33 / 13 + 0.5)
    with pytest.raises(ValueError, match="positive"):
        expected_duration(SENTENCE, speed=0.0)


def test_wide_characters_take_longer() -> None:
    assert estimate_seconds("日本語") > 2 * estimate_seconds("abc")
    assert expected_duration("0151 23456789").most_s > 7  # as it is written, each digit a word


def test_estimates_add_up() -> None:
    pieces = ["One, two; ", "three. ", "Four"]
    assert estimate_seconds("".join(pieces)) == pytest.approx(sum(map(estimate_seconds, pieces)))


def test_max_tokens_is_at_least_one() -> None:
    assert expected_duration("a").max_tokens(25.0) >= 1
    assert expected_duration(SENTENCE).max_tokens(25.0) == -(
        -expected_duration(SENTENCE).most_s * 25 // 1
    )
