"""Sound to a client: resampled without seams, and encoded in the format of its session.

Owns OpenAI's formats of realtime output. `hearing.sound_input` reads the same formats.
"""

from __future__ import annotations

import numpy as np

from triptych.core.media.audio.resampling import Pcm, Resampler
from triptych.modalities.talk.hearing.sound_input import (
    SAMPLE_RATES,
    SoundFormat,
    SoundInput,
    milliseconds,
)
from triptych.modalities.talk.ports import HEARING_RATE


class SoundOutput:
    """One answer's sound as bytes in `form`."""

    def __init__(self, form: SoundFormat) -> None:
        self._form = form
        self._rate = SAMPLE_RATES[form]
        self._levels = None if form == "pcm16" else _levels(form)
        self._resampler: Resampler | None = None

    def push(self, pcm_S: Pcm, sample_rate: int) -> bytes:
        """Take the next samples, all of one rate, and return the bytes that are ready."""
        if self._resampler is None:
            self._resampler = Resampler(sample_rate, self._rate)
        return self._encode(self._resampler.push(pcm_S))

    def finish(self) -> bytes:
        """Return the last bytes."""
        return b"" if self._resampler is None else self._encode(self._resampler.flush())

    def milliseconds(self, data: bytes) -> float:
        """How long encoded sound lasts."""
        return milliseconds(self._form, data)

    def _encode(self, pcm_S: Pcm) -> bytes:
        clipped_S = np.clip(pcm_S, -1.0, 1.0)
        if self._levels is None:
            return np.round(clipped_S * 32767).astype("<i2").tobytes()
        values, codes = self._levels
        middles = (values[1:] + values[:-1]) / 2
        encoded: bytes = codes[np.searchsorted(middles, clipped_S)].tobytes()
        return encoded


def _levels(form: SoundFormat) -> tuple[Pcm, np.ndarray]:
    """The values of all codes in order, and the codes: encoding takes the nearest value."""
    values = SoundInput(form, HEARING_RATE).push(bytes(range(256)))
    order = np.argsort(values, kind="stable")
    return values[order], order.astype(np.uint8)
