"""Fades in the beginning of a sound.

Owns the ramp. Knows neither containers nor models. A model trained on tightly cut clips may begin
in the middle of a wave, and that step is heard as a click.
"""

from __future__ import annotations

import numpy as np

from triptych.core.media.audio.resampling import Pcm

FADE_S = 0.005
"""Short enough to keep plosives, long enough to remove the click."""


class FadeIn:
    """Fades in sounds at `sample_rate` (Hz), one after another; the first begins at once.

    The ramp is half a cosine period. The output is as long as the input, and does not depend on
    chunk boundaries.
    """

    def __init__(self, sample_rate: int) -> None:
        num = round(FADE_S * sample_rate)
        self._gains = (0.5 - 0.5 * np.cos(np.pi * np.arange(num) / num)).astype(np.float32)
        self._num_faded = 0

    def restart(self) -> None:
        """Begin another sound with the next sample."""
        self._num_faded = 0

    def push(self, pcm_S: Pcm) -> Pcm:
        """Fade the next samples, any number of them."""
        gains = self._gains[self._num_faded :][: len(pcm_S)]
        self._num_faded += len(gains)
        faded_S = pcm_S.copy()
        faded_S[: len(gains)] *= gains
        return faded_S
