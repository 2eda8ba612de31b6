"""Windows end at the quietest moment of their last third."""

from __future__ import annotations

import numpy as np
import pytest

from support.asr import noise
from triptych.modalities.asr.pauses import is_silent, padded, window_end
from triptych.modalities.asr.spec import SAMPLE_RATE


@pytest.mark.parametrize("pause_s", [4.4, 5.0, 5.5])
def test_a_window_ends_in_the_pause(pause_s: float) -> None:
    pcm_S = noise(10.0)
    at, half = round(pause_s * SAMPLE_RATE), SAMPLE_RATE // 8
    pcm_S[at - half : at + half] *= 0.01
    end = window_end(pcm_S, 0, 6 * SAMPLE_RATE)
    assert abs(end - at) < half


def test_the_last_window_ends_with_the_recording() -> None:
    assert window_end(noise(5.0), 0, 6 * SAMPLE_RATE) == 5 * SAMPLE_RATE
    assert window_end(noise(9.0), 4 * SAMPLE_RATE, 6 * SAMPLE_RATE) == 9 * SAMPLE_RATE


def test_short_windows_are_padded_and_silent_ones_known() -> None:
    assert len(padded(noise(0.1))) == SAMPLE_RATE // 2
    assert is_silent(np.zeros(10, np.float32))
    assert not is_silent(noise(0.1))
