import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import InvalidRequest
from triptych.modalities.tts.text.guard import (
    LoopDetector,
    RunawayGuard,
    check_spoken,
    check_text,
    estimate_seconds,
    expected_duration,
    z_function,
)
from triptych.modalities.tts.text.normalize import Normalizer

normalize = Normalizer()
SENTENCE = "The quick brown fox jumps over the lazy dog."


@pytest.mark.parametrize("text", ["", "   ", "\n\t\u3000"])
def test_empty_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="empty") as caught:
        check_text(text)
    assert caught.value.param == "input"


@pytest.mark.parametrize("text", ["😀", "🎉 ✨!", "...", "-- * --", "\u200b"])
def test_text_without_words_is_refused(text: str) -> None:
    check_text(text)
    with pytest.raises(InvalidRequest, match="no words"):
        check_spoken(normalize(text))


def test_endless_text_is_refused_with_the_limit() -> None:
    check_text("a" * 4096, max_characters=4096)
    with pytest.raises(InvalidRequest, match=r"100000 characters; at most 4096"):
        check_text("a" * 100_000, max_characters=4096)


@pytest.mark.parametrize("text", ["a", "5", "Hi 😀", "日本"])
def test_text_with_a_word_passes(text: str) -> None:
    check_text(text)
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


def test_estimates_add_up() -> None:
    pieces = ["One, two; ", "three. ", "Four"]
    assert estimate_seconds("".join(pieces)) == pytest.approx(sum(map(estimate_seconds, pieces)))


def test_max_tokens_is_at_least_one() -> None:
    assert expected_duration("a").max_tokens(25.0) >= 1
    assert expected_duration(SENTENCE).max_tokens(25.0) == -(
        -expected_duration(SENTENCE).most_s * 25 // 1
    )


@given(st.lists(st.integers(0, 2), max_size=40))
def test_z_function_counts_the_common_beginning(items: list[int]) -> None:
    naive = []
    for at in range(len(items)):
        length = 0
        while at + length < len(items) and items[length] == items[at + length]:
            length += 1
        naive.append(length)
    assert z_function(items) == naive


@given(
    st.lists(st.integers(0, 1), max_size=60),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.integers(1, 20),
)
def test_find_agrees_with_the_definition(head: list[int], cycle: list[int], times: int) -> None:
    detector = LoopDetector(least_tokens=12, num_repeats=3, longest_period=6)
    tokens = head + cycle * times
    for token in tokens:
        detector.push(token)
    recent = tokens[-18:]

    def repeats(period: int) -> int:
        length = period
        while length < len(recent) and recent[-1 - length] == recent[-1 - length + period]:
            length += 1
        return length

    expected = next(
        ((p, repeats(p)) for p in range(1, min(7, len(recent))) if repeats(p) >= max(12, 3 * p)),
        None,
    )
    assert detector.find() == expected


def _guard(text: str = SENTENCE) -> RunawayGuard:
    return RunawayGuard(expected_duration(text), tokens_per_s=25.0)


def test_an_engine_without_an_end_is_stopped_in_bound() -> None:
    guard, rng, num = _guard(), random.Random(1), 0
    while guard.push([rng.randrange(4096)]) is None:
        num += 1
        assert num < 1000
    assert guard.finish_reason == "length"
    assert guard.num_tokens == guard.max_tokens == guard.num_sound_tokens
    assert guard.push([1, 2, 3]) == "length"
    assert guard.num_tokens == guard.max_tokens


@pytest.mark.parametrize("period", [1, 2, 7, 25])
def test_a_loop_is_ended_before_the_bound(period: int) -> None:
    guard, rng = _guard(SENTENCE * 8), random.Random(2)
    speech = [rng.randrange(4096) for _ in range(60)]
    cycle = [(token, token + 1) for token in range(period)]
    assert guard.push(speech) is None
    assert guard.push(cycle * 400) == "loop"
    assert guard.loop is not None
    assert guard.loop.period == period
    assert guard.num_tokens < guard.max_tokens
    # What is kept is the speech, one cycle, and at most what the window has already forgotten.
    assert 60 + period <= guard.num_sound_tokens < guard.num_tokens


def test_a_pause_is_no_loop() -> None:
    guard, rng = _guard(SENTENCE * 8), random.Random(3)
    for _ in range(5):
        speech = [rng.randrange(4096) for _ in range(40)]
        assert guard.push(speech + [7] * 30) is None
    assert guard.stop() == "stop"


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_the_verdict_does_not_depend_on_the_pushes(sizes: list[int]) -> None:
    tokens = [*range(50), *([1, 2, 3] * 200)]
    whole = _guard(SENTENCE * 8)
    whole.push(tokens)
    parts, at = _guard(SENTENCE * 8), 0
    for size in [*sizes, len(tokens)]:
        parts.push(tokens[at : at + size])
        at += size
    assert (parts.finish_reason, parts.num_tokens, parts.loop) == (
        whole.finish_reason,
        whole.num_tokens,
        whole.loop,
    )
    assert whole.finish_reason == "loop"


def test_a_stop_does_not_hide_why_it_was_ended() -> None:
    guard = _guard()
    guard.push([5] * 500)
    assert guard.stop() == guard.finish_reason == "loop"


@pytest.mark.parametrize("wrong", [{"least_tokens": 1}, {"num_repeats": 1}, {"longest_period": 0}])
def test_a_detector_of_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="loop"):
        LoopDetector(**{"least_tokens": 10, **wrong})
