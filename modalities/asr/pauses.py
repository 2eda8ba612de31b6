"""Cutting a long recording at its pauses, for families without timestamps.

Owns where a window ends: at its quietest moment. Knows no model and no torch, only samples.
"""

from __future__ import annotations

import numpy as np

from triptych.core.media.audio.resampling import Pcm
from triptych.modalities.asr.spec import SAMPLE_RATE

MIN_WINDOW_S = 0.5
"""Shorter windows are padded with silence."""
_FRAME = SAMPLE_RATE // 50
_FRAMES_PER_PAUSE = 10
_SEARCHED = 1 / 3
_SILENCE = 10 ** (-70 / 20)


def window_end(pcm_S: Pcm, start: int, max_samples: int) -> int:
    """The sample at which the window from `start` on ends.

    The quietest fifth of a second in the last third of `max_samples`, the latest of equals; or the
    end of the recording.
    """
    if len(pcm_S) - start <= max_samples:
        return len(pcm_S)
    searched_S = pcm_S[start + round(max_samples * (1 - _SEARCHED)) : start + max_samples]
    num_frames = len(searched_S) // _FRAME
    frames = searched_S[len(searched_S) - num_frames * _FRAME :].reshape(num_frames, _FRAME)
    power = np.square(frames, dtype=np.float64).sum(1)
    pauses = np.convolve(power, np.ones(_FRAMES_PER_PAUSE), "valid")
    num_after = int(pauses[::-1].argmin()) + _FRAMES_PER_PAUSE // 2
    return start + max_samples - num_after * _FRAME


def is_silent(pcm_S: Pcm) -> bool:
    """Whether samples stay below -70 dBFS."""
    return float(np.ptp(pcm_S)) < 2 * _SILENCE


def padded(pcm_S: Pcm) -> Pcm:
    """Samples with silence up to the shortest window."""
    return np.pad(pcm_S, (0, max(0, round(MIN_WINDOW_S * SAMPLE_RATE) - len(pcm_S))))
