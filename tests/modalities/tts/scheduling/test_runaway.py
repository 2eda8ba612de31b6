"""Loops in the codes of endless speech."""

import random
from collections.abc import Hashable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.modalities.tts.scheduling.state import Loop, LoopDetector, z_function


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


def _first_loop(detector: LoopDetector, tokens: Iterable[Hashable]) -> tuple[Loop | None, int]:
    """The first loop found, and how many tokens were pushed until then."""
    num = 0
    for token in tokens:
        num += 1
        if (loop := detector.push(token)) is not None:
            return loop, num
    return None, num


def test_speech_that_does_not_repeat_is_no_loop() -> None:
    rng = random.Random(1)
    speech = [rng.randrange(4096) for _ in range(1000)]
    assert _first_loop(LoopDetector(least_tokens=75), speech) == (None, 1000)


@pytest.mark.parametrize("period", [1, 2, 7, 25])
def test_a_loop_is_found_soon(period: int) -> None:
    rng = random.Random(2)
    speech = [rng.randrange(4096) for _ in range(60)]
    cycle = [(token, token + 1) for token in range(period)]
    loop, num = _first_loop(LoopDetector(least_tokens=75), [*speech, *cycle * 400])
    assert loop is not None
    assert loop.period == period
    assert num < 2000
    # What is kept is the speech, one cycle, and at most what the window has already forgotten.
    assert 60 + period <= num - loop.num_tokens + loop.period < num


def test_a_pause_is_no_loop() -> None:
    detector, rng = LoopDetector(least_tokens=75), random.Random(3)
    for _ in range(5):
        speech = [rng.randrange(4096) for _ in range(40)]
        assert _first_loop(detector, speech + [7] * 30) == (None, 70)


@pytest.mark.parametrize("wrong", [{"least_tokens": 1}, {"num_repeats": 1}, {"longest_period": 0}])
def test_a_detector_of_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="loop"):
        LoopDetector(**{"least_tokens": 10, **wrong})
