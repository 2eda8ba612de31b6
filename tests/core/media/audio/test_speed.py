"""The time stretch: length, continuity, pitch, and no trace of cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.audio_signals import babble
from triptych.core.media.audio.resampling import Pcm
from triptych.core.media.audio.speed import TimeStretch

RATE = 24000


def tone(frequency: float, num_samples: int) -> Pcm:
    phase_S = 2 * np.pi * frequency * np.arange(num_samples) / RATE
    return (0.5 * np.sin(phase_S)).astype(np.float32)


def stretch(pcm_S: Pcm, speed: float, sizes: list[int] | None = None) -> Pcm:
    stream, start, parts = TimeStretch(speed, RATE), 0, []
    for size in [*(sizes or []), len(pcm_S)]:
        parts.append(stream.push(pcm_S[start : start + size]))
        start += size
    return np.concatenate([*parts, stream.flush()])


@settings(max_examples=25, deadline=None)
@given(
    speed=st.floats(0.25, 4),
    num_samples=st.integers(0, 6000),
    sizes=st.lists(st.integers(0, 900), max_size=8),
)
@example(speed=3.0, num_samples=840, sizes=[])  # the last step reached beyond the end
def test_length_follows_speed_and_cuts_leave_no_trace(speed, num_samples, sizes):
    pcm_S = babble(6000, RATE)[:num_samples]
    whole_S = stretch(pcm_S, speed)
    assert len(whole_S) == round(num_samples / speed)
    np.testing.assert_array_equal(stretch(pcm_S, speed, sizes), whole_S)


def test_unit_speed_gives_back_the_input():
    pcm_S = babble(RATE, RATE)
    np.testing.assert_allclose(stretch(pcm_S, 1.0, [100] * 50), pcm_S, atol=1e-6)


@pytest.mark.parametrize("speed", [0.25, 0.5, 0.8, 1.25, 2.0, 4.0])
@pytest.mark.parametrize("frequency", [70, 110, 440])
def test_a_tone_keeps_its_pitch_loudness_and_smoothness(speed, frequency):
    pcm_S = tone(frequency, 2 * RATE)
    out_S = stretch(pcm_S, speed)
    body_S = out_S[1000 : len(out_S) - round(1200 / min(speed, 1))]
    spectrum = np.abs(np.fft.rfft(body_S * np.hanning(len(body_S)), 8 * RATE))
    assert np.argmax(spectrum) / 8 == pytest.approx(frequency, rel=0.02)
    assert body_S.std() == pytest.approx(pcm_S.std(), rel=0.03)
    # A click would stand out in the second difference.
    assert np.abs(np.diff(body_S, 2)).max() < 1.1 * np.abs(np.diff(pcm_S, 2)).max()


@pytest.mark.parametrize("speed", [0.25, 1.0, 4.0])
def test_little_is_held_back(speed):
    stream, pcm_S, num_out = TimeStretch(speed, RATE), babble(RATE, RATE), 0
    for start in range(0, RATE, 100):
        num_out += len(stream.push(pcm_S[start : start + 100]))
        assert (start + 100) - num_out * speed < 0.048 * RATE


def test_silence_stays_silent():
    assert not stretch(np.zeros(5000, np.float32), 1.5).any()
