"""The policy of long transcription, with made-up windows: no model."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.asr import END, FIRST_TIME, WINDOW_S, spec
from triptych.modalities.asr.windows import (
    FALLBACK_TEMPERATURES,
    Attempt,
    TranscriptCursor,
    best_attempt,
    compression_ratio,
    cut_window,
    has_words,
    temperatures,
)

SPEC = spec()
WINDOW = 100 * WINDOW_S
A, B, C = 65, 66, 67


def at(seconds: float) -> int:
    return FIRST_TIME + round(seconds * 50)


def attempt(*token_ids: int, **fields: Any) -> Attempt:
    good = Attempt(
        token_ids=token_ids,
        logprobs=(-0.1,) * len(token_ids),
        avg_logprob=-0.1,
        no_speech_prob=0.0,
        compression_ratio=1.0,
        temperature=0.0,
    )
    return replace(good, **fields)


def bounds(*token_ids: int, num_frames: int = WINDOW) -> tuple[list[tuple[int, ...]], int]:
    cut = cut_window(SPEC, token_ids, num_frames)
    return [(s.start, s.stop, s.start_frame, s.end_frame) for s in cut.spans], cut.num_frames


def test_pairs_of_times_part_stretches_and_an_unfinished_one_waits() -> None:
    tokens = (at(0), A, B, at(1), at(1), C, at(2), at(2), A)
    assert bounds(*tokens) == ([(0, 4, 0, 100), (4, 7, 100, 200)], 200)


def test_one_time_at_the_end_means_silence_after_it() -> None:
    tokens = (at(0.5), A, at(1), at(1), B, at(2))
    assert bounds(*tokens) == ([(0, 3, 50, 100), (3, 6, 100, 200)], WINDOW)


@pytest.mark.parametrize(
    ("tokens", "end_frame"),
    [((at(0), A, B), 250), ((at(0), A, at(1.5)), 150), ((at(0), A, at(0)), 250), ((A,), 250)],
)
def test_without_pairs_a_window_is_one_stretch(tokens: tuple[int, ...], end_frame: int) -> None:
    """Up to its last time, or to its end where there is none but the beginning's."""
    assert bounds(*tokens, num_frames=250) == ([(0, len(tokens), 0, end_frame)], 250)


token = st.one_of(st.integers(0, END - 1), st.integers(FIRST_TIME, FIRST_TIME + 50 * WINDOW_S))


@given(st.lists(token, max_size=40), st.integers(1, WINDOW))
def test_every_window_gets_somewhere_and_keeps_its_bounds(
    token_ids: list[int], num_frames: int
) -> None:
    cut = cut_window(SPEC, token_ids, num_frames)
    assert 0 < cut.num_frames <= num_frames
    edges = [edge for span in cut.spans for edge in (span.start, span.stop)]
    assert edges == sorted(edges)
    assert edges[0] == 0
    assert edges[-1] <= len(token_ids)


@given(st.lists(st.lists(token, max_size=20), min_size=1, max_size=8), st.integers(1, 2000))
def test_a_reading_ends_and_never_shows_more_than_the_model_can_see(
    answers: list[list[int]], num_frames: int
) -> None:
    reading = TranscriptCursor(SPEC, range(100))
    num_windows = 0
    while reading.frame < num_frames:
        assert len(reading.prompt_ids) <= SPEC.max_prompt_tokens + 1
        assert not reading.prompt_ids or reading.prompt_ids[0] == SPEC.previous_id
        before = reading.frame
        left = min(WINDOW, num_frames - before)
        spans = reading.take(attempt(*answers[num_windows % len(answers)]), left)
        assert before < reading.frame <= num_frames
        assert all(s.end_frame > s.start_frame for s in spans)
        num_windows += 1
    assert num_windows <= num_frames


def test_next_window_is_prompted_with_previous_text() -> None:
    reading = TranscriptCursor(SPEC, (1, 2))
    assert reading.prompt_ids == (SPEC.previous_id, 1, 2)
    reading.take(attempt(at(0), A, at(1), at(1), B, at(2), at(2), C), WINDOW)
    assert reading.frame == 200
    assert reading.prompt_ids == (SPEC.previous_id, 1, 2, at(0), A, at(1), at(1), B, at(2))


def test_text_sampled_hot_is_not_shown_on() -> None:
    reading = TranscriptCursor(SPEC, (1, 2))
    assert reading.take(attempt(at(0), A, at(1), temperature=0.6), WINDOW)
    assert reading.prompt_ids == ()


def test_silence_is_passed_over_and_forgets_nothing() -> None:
    reading = TranscriptCursor(SPEC, (1,))
    silent = attempt(at(0), A, at(1), no_speech_prob=0.7, avg_logprob=-1.2)
    assert reading.take(silent, WINDOW) == ()
    assert (reading.frame, reading.prompt_ids) == (WINDOW, (SPEC.previous_id, 1))


def test_stretches_without_length_or_text_are_left_out() -> None:
    reading = TranscriptCursor(SPEC, ())
    tokens = (at(1), A, at(1), at(1), at(2), at(2), B, at(3), at(3))
    assert [s.start for s in reading.take(attempt(*tokens), WINDOW)] == [5]


@pytest.mark.parametrize(
    ("fields", "is_good", "is_silent"),
    [
        ({}, True, False),
        ({"avg_logprob": -1.1}, False, False),
        ({"compression_ratio": 2.5}, True, False),
        ({"compression_ratio": 2.5, "avg_logprob": -0.6}, False, False),
        ({"compression_ratio": 2.5, "has_ended": False}, False, False),
        ({"no_speech_prob": 0.95, "avg_logprob": -0.8}, True, True),
        ({"no_speech_prob": 0.95, "avg_logprob": -0.4}, True, False),
        ({"has_words": False}, True, True),
        ({"no_speech_prob": 0.9}, True, False),
        ({"no_speech_prob": 0.9, "avg_logprob": -1.1}, True, True),
        ({"no_speech_prob": 0.9, "avg_logprob": -1.1, "compression_ratio": 9.0}, True, True),
    ],
)
def test_what_is_tried_again(fields: dict[str, Any], is_good: bool, is_silent: bool) -> None:
    tried = attempt(A, **fields)
    assert (tried.is_good, tried.is_silent) == (is_good, is_silent)


def test_the_likeliest_attempt_stands_unless_it_is_a_loop() -> None:
    likely, unlikely = attempt(A, avg_logprob=-0.7), attempt(A, avg_logprob=-3.0)
    repetitive = attempt(A, avg_logprob=-0.6, compression_ratio=2.7)
    loop = attempt(A, avg_logprob=-0.1, compression_ratio=9.0, has_ended=False)
    for attempts in permutations((likely, unlikely, repetitive, loop)):
        assert best_attempt(attempts) is repetitive
    assert best_attempt([loop, unlikely]) is unlikely
    assert best_attempt([loop]) is loop


@pytest.mark.parametrize(
    ("text", "has_any"),
    [("", False), (" . . .", False), ("..", False), ("-?!", False), ("you", True), ("♪", True)],
)
def test_punctuation_is_no_word(text: str, has_any: bool) -> None:
    assert has_words(text) is has_any


def test_a_temperature_that_was_asked_for_stands() -> None:
    assert temperatures(0.0) == FALLBACK_TEMPERATURES
    assert temperatures(0.3) == (0.3,)


def test_repetition_compresses() -> None:
    assert compression_ratio("again and " * 30) > 2.4 > compression_ratio("The quick brown fox.")
