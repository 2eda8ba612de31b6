"""When a turn begins and ends, by probabilities of speech and by sound."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.hearing import LoudnessNetwork, sound
from triptych.core.errors import InvalidRequest
from triptych.modalities.talk.hearing.turns import (
    FRAME_MS,
    HALF_MS,
    TurnTracker,
    VoiceTurnDetector,
)
from triptych.modalities.talk.ports import (
    IdleTimedOut,
    SpeechDismissed,
    SpeechStarted,
    SpeechStopped,
    SpeechSuspected,
    TurnEvent,
    TurnOptions,
)

HIGH, MIDDLE, LOW = 0.8, 0.42, 0.1


def events(frames: list[float], options: TurnOptions) -> list[TurnEvent]:
    tracker = TurnTracker(options)
    return [event for frame in frames if (event := tracker.take(frame)) is not None]


def test_a_turn_begins_early_by_the_padding_and_ends_where_speech_did() -> None:
    frames = [LOW] * 20 + [HIGH] * 30 + [LOW] * 20
    found = events(frames, TurnOptions())
    assert found == [SpeechStarted(20 * FRAME_MS - 300), SpeechStopped(50 * FRAME_MS)]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([LOW, HIGH, LOW] * 20, []),  # clicks
        ([HIGH] * 9 + [MIDDLE] * 40 + [HIGH] * 9, [SpeechStarted(0)]),  # hysteresis
        ([HIGH] * 9 + [LOW] * 15 + [HIGH] * 9 + [LOW] * 15, [SpeechStarted(0)]),  # short pauses
        ([HIGH] * 9 + [LOW] + [MIDDLE] * 15, [SpeechStarted(0), SpeechStopped(9 * FRAME_MS)]),
    ],
)
def test_what_neither_begins_nor_ends_a_turn(
    frames: list[float], expected: list[TurnEvent]
) -> None:
    assert events(frames, TurnOptions()) == expected


def test_padding_does_not_reach_into_the_turn_before() -> None:
    options = TurnOptions(silence_duration_ms=2 * FRAME_MS, prefix_padding_ms=1000)
    found = events([HIGH] * 4 + [LOW] * 3 + [HIGH] * 4, options)
    assert found[-1] == SpeechStarted(6 * FRAME_MS)


SUSPICIOUS, CALM = 0.1, 0.05
NUM_CALM, NUM_HELD = 22, 8


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([SUSPICIOUS, HIGH, HIGH], [SpeechSuspected(704), SpeechStarted(436)]),
        ([SUSPICIOUS] + [CALM] * 8, [SpeechSuspected(704), SpeechDismissed(992)]),
        ([SUSPICIOUS] * 99, [SpeechSuspected(704), SpeechDismissed(992)]),  # then by the usual rule
        ([SUSPICIOUS] * 9 + [HIGH] * 2, [..., ..., SpeechStarted(692)]),
        ([SUSPICIOUS] + [CALM] * 30 + [SUSPICIOUS], [..., ..., SpeechSuspected(1696)]),
        ([SUSPICIOUS] + [CALM] * 20 + [SUSPICIOUS], [..., ...]),  # no calm since the last one
        ([HIGH, HIGH] + [CALM] * 30 + [SUSPICIOUS], [..., ..., ..., SpeechSuspected(1728)]),
    ],
)
def test_a_frame_that_stands_out_from_a_calm_is_suspected_to_be_speech(
    frames: list[float], expected: list[Any]
) -> None:
    calm = [CALM] * NUM_CALM
    found = events([*calm, *frames], TurnOptions(reports_suspicion=True))
    assert [
        each for each in zip(found, expected, strict=True) if each[1] not in (..., each[0])
    ] == []
    assert not {SpeechSuspected, SpeechDismissed} & set(map(type, events(frames, TurnOptions())))


@pytest.mark.parametrize("size", [100, 512, 700, 10**6])
def test_speech_is_suspected_in_the_frame_between_two_others(size: int) -> None:
    """Speech that begins with a frame is in the one that began half a frame before it."""
    pcm_S = sound((False, 40 * FRAME_MS / 1000), (True, 0.5))
    detector = VoiceTurnDetector(LoudnessNetwork(), TurnOptions(reports_suspicion=True))
    pieces = [pcm_S[at : at + size] for at in range(0, len(pcm_S), size)]
    found = [event for each in pieces for event in detector.push(each)]
    begin_ms = 40 * FRAME_MS
    assert found == [SpeechSuspected(begin_ms - HALF_MS), SpeechStarted(begin_ms - 300)]


def begins(tracker: TurnTracker, level: float, *, is_answering: bool) -> bool:
    """Whether speech of this level begins a turn, which is then over."""
    found = [tracker.take(HIGH, level, is_answering=is_answering) for _ in range(9)]
    for _ in range(20):
        tracker.take(LOW)
    return any(isinstance(each, SpeechStarted) for each in found)


def test_an_answer_is_not_interrupted_by_its_echo() -> None:
    """Speech 20 dB below the user's turns is one while an answer is played, 9 dB below is not."""
    tracker = TurnTracker(TurnOptions())
    assert begins(tracker, 0.001, is_answering=True), "the user has not been heard yet"
    assert begins(tracker, 0.2, is_answering=False)
    assert not begins(tracker, 0.02, is_answering=True)
    assert begins(tracker, 0.07, is_answering=True)
    assert begins(tracker, 0.02, is_answering=False), "a soft turn of the user"
    assert begins(tracker, 0.02, is_answering=True), "the user speaks more softly now"


def test_a_suspicion_ends_with_what_is_forgotten() -> None:
    tracker = TurnTracker(TurnOptions(reports_suspicion=True))
    for probability in [CALM] * NUM_CALM + [SUSPICIOUS]:
        tracker.take(probability)
    tracker.reset()
    assert [tracker.take(CALM) for _ in range(NUM_HELD + 1)] == [None] * (NUM_HELD + 1)


def test_silence_after_an_answer_is_reported_once() -> None:
    tracker = TurnTracker(TurnOptions(idle_timeout_ms=10 * FRAME_MS))
    assert [tracker.take(LOW) for _ in range(30)] == [None] * 30  # nothing was played yet
    tracker.rest()
    found = [event for _ in range(40) if (event := tracker.take(LOW))]
    assert found == [IdleTimedOut(30 * FRAME_MS, 40 * FRAME_MS)]
    tracker.rest()
    assert not any(isinstance(tracker.take(HIGH), IdleTimedOut) for _ in range(40))


@pytest.mark.parametrize("num_before", range(NUM_HELD + 4))
def test_a_long_silence_ends_no_suspicion_and_waits_for_its_end(num_before: int) -> None:
    """Whichever frames the two fall on: a client that holds an answer learns that it may go on."""
    options = TurnOptions(idle_timeout_ms=(NUM_CALM + 2 * NUM_HELD) * FRAME_MS)
    tracker = TurnTracker(replace(options, reports_suspicion=True))
    tracker.rest()
    frames = [CALM] * (NUM_CALM + NUM_HELD - 2 + num_before) + [SUSPICIOUS] + [CALM] * 20
    kinds = [type(event) for frame in frames if (event := tracker.take(frame))]
    assert [kind for kind in kinds if kind != IdleTimedOut] == [SpeechSuspected, SpeechDismissed]
    assert kinds.count(IdleTimedOut) == 1
    assert kinds[1] != IdleTimedOut


PROBABILITIES = st.lists(st.sampled_from([HIGH, MIDDLE, LOW, 0.5, 0.349]), max_size=200)
OPTIONS = st.builds(
    TurnOptions,
    threshold=st.sampled_from([0.1, 0.5, 0.9]),
    prefix_padding_ms=st.integers(0, 500),
    silence_duration_ms=st.integers(0, 600),
)


@settings(max_examples=60, deadline=None)
@given(PROBABILITIES, OPTIONS)
def test_events_alternate_in_order(frames: list[float], options: TurnOptions) -> None:
    found = events(frames, options)
    assert found == events(frames, options)
    kinds = [type(event) for event in found]
    assert kinds == ([SpeechStarted, SpeechStopped] * len(kinds))[: len(kinds)]
    times_ms = [event.at_ms for event in found if not isinstance(event, IdleTimedOut)]
    assert all(before <= after for before, after in pairwise([0, *times_ms]))


def test_sound_gives_equal_events_however_it_is_cut() -> None:
    pcm_S = sound((False, 0.5), (True, 1.0), (False, 1.0))
    whole = VoiceTurnDetector(LoudnessNetwork(), TurnOptions())
    cut = VoiceTurnDetector(LoudnessNetwork(), TurnOptions())
    pieces = [pcm_S[at : at + 700] for at in range(0, len(pcm_S), 700)]
    expected = [SpeechStarted(180), SpeechStopped(1504)]
    assert whole.push(pcm_S) == [event for each in pieces for event in cut.push(each)] == expected


def test_a_clear_forgets_speech_and_keeps_the_clock() -> None:
    detector = VoiceTurnDetector(LoudnessNetwork(), TurnOptions())
    detector.push(sound((True, 0.96)))
    detector.reset()
    assert detector.push(sound((True, 0.5))) == [SpeechStarted(960)]


@pytest.mark.parametrize(
    "options",
    [
        TurnOptions(threshold=0.0),
        TurnOptions(threshold=1.0),
        TurnOptions(prefix_padding_ms=-1),
        TurnOptions(silence_duration_ms=10**6),
        TurnOptions(idle_timeout_ms=-5),
    ],
)
def test_options_out_of_range_are_refused(options: TurnOptions) -> None:
    with pytest.raises(InvalidRequest):
        VoiceTurnDetector(LoudnessNetwork(), options)
