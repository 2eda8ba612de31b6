"""The beginning of a sound, raised from silence.

Owns the ramp. Knows neither containers nor models. A model trained on clips that were cut close may
begin in the middle of a wave: that step is heard as a click.
"""

from __future__ import annotations

import numpy as np

from triptych.core.media.audio.resampling import Pcm

FADE_S = 0.005
"""Short enough to leave a plosive as it is, long enough that no click remains."""


class FadeIn:
    """Fades in sounds at `sample_rate` (Hz), one after another; the first begins at once.

    Half a period of a cosine. The output is as long as the input, and does not depend on how
    that is cut.
    """

    def __init__(self, sample_rate: int) -> None:
        num = round(FADE_S * sample_rate)
        self._gains = (0.5 - 0.5 * np.cos(np.pi * np.arange(num) / num)).astype(np.float32)
        self._num_faded = 0

    def restart(self) -> None:
        """Say that the next sample begins another sound."""
        self._num_faded = 0

    def push(self, pcm_S: Pcm) -> Pcm:
        """The next samples, any number of them, as they are to be heard."""
        gains = self._gains[self._num_faded :][: len(pcm_S)]
        self._num_faded += len(gains)
        faded_S = pcm_S.copy()
        faded_S[: len(gains)] *= gains
        return faded_S
