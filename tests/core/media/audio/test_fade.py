"""The ramp at the beginning of a sound: no step, nothing else changed, no trace of cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.media.audio.fade import FADE_S, FadeIn


@pytest.mark.parametrize("rate", [8000, 24_000, 48_000])
def test_a_sound_rises_from_silence_and_is_itself_from_then_on(rate: int) -> None:
    pcm_S = FadeIn(rate).push(np.ones(rate, np.float32))
    num = round(FADE_S * rate)
    assert pcm_S[0] == 0
    assert np.diff(pcm_S).max() < 2 / num
    assert (np.diff(pcm_S[:num]) > 0).all()
    assert (pcm_S[num:] == 1).all()


@given(st.lists(st.integers(0, 150), max_size=8), st.integers(0, 200))
def test_cuts_leave_no_trace(sizes: list[int], rest: int) -> None:
    num = sum(sizes) + rest
    sound_S = np.linspace(-1, 1, num, dtype=np.float32)
    fade, start, parts = FadeIn(24_000), 0, []
    for size in [*sizes, rest]:
        parts.append(fade.push(sound_S[start : start + size]))
        start += size
    np.testing.assert_array_equal(np.concatenate(parts), FadeIn(24_000).push(sound_S))


def test_the_next_sound_is_faded_in_too_and_the_input_left_alone() -> None:
    fade, sound_S = FadeIn(24_000), np.ones(500, np.float32)
    first_S = fade.push(sound_S)
    fade.restart()
    np.testing.assert_array_equal(fade.push(sound_S), first_S)
    assert (sound_S == 1).all()
