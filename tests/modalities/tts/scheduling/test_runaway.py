"""The guard against endless speech, and the loops it finds."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.modalities.tts.scheduling.state import LoopDetector, RunawayGuard, z_function


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


def _guard(max_tokens: int = 2000) -> RunawayGuard:
    return RunawayGuard(max_tokens=max_tokens, tokens_per_s=25.0)


def test_an_engine_without_an_end_is_stopped_in_bound() -> None:
    guard, rng, num = _guard(300), random.Random(1), 0
    while guard.push([rng.randrange(4096)]) is None:
        num += 1
        assert num < 1000
    assert guard.finish_reason == "length"
    assert guard.num_tokens == guard.max_tokens == guard.num_sound_tokens
    assert guard.push([1, 2, 3]) == "length"
    assert guard.num_tokens == guard.max_tokens


@pytest.mark.parametrize("period", [1, 2, 7, 25])
def test_a_loop_is_ended_before_the_bound(period: int) -> None:
    guard, rng = _guard(), random.Random(2)
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
    guard, rng = _guard(), random.Random(3)
    for _ in range(5):
        speech = [rng.randrange(4096) for _ in range(40)]
        assert guard.push(speech + [7] * 30) is None
    assert guard.stop() == "stop"


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_the_verdict_does_not_depend_on_the_pushes(sizes: list[int]) -> None:
    tokens = [*range(50), *([1, 2, 3] * 200)]
    whole = _guard()
    whole.push(tokens)
    parts, at = _guard(), 0
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
