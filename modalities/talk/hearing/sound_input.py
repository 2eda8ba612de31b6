"""Raw sound from a client, piece by piece: decoded, and resampled without seams.

Owns OpenAI's formats of realtime input: `pcm16` at 24 kHz, G.711 mu-law and A-law at 8 kHz. Knows
no containers; `core.media.audio.intake` reads files.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from triptych.core.media.audio.resampling import Pcm, Resampler
from triptych.modalities.talk.ports import HEARING_RATE

SoundFormat: TypeAlias = Literal["pcm16", "g711_ulaw", "g711_alaw"]
SAMPLE_RATES: dict[SoundFormat, int] = {"pcm16": 24_000, "g711_ulaw": 8_000, "g711_alaw": 8_000}


def milliseconds(form: SoundFormat, data: bytes) -> float:
    """How long encoded sound lasts."""
    num_samples = len(data) / (2 if form == "pcm16" else 1)
    return 1000 * num_samples / SAMPLE_RATES[form]


class SoundInput:
    """One stream of bytes in `form`, as samples [S] at `HEARING_RATE`.

    `sample_rate` is that of pcm16. Pieces may be cut anywhere, also inside a sample.
    """

    def __init__(self, form: SoundFormat, sample_rate: int = 0) -> None:
        self._form = form
        self._resampler = Resampler(sample_rate or SAMPLE_RATES[form], HEARING_RATE)
        self._rest = b""

    def push(self, data: bytes) -> Pcm:
        """Take the next bytes, and return the samples that are ready."""
        if self._form != "pcm16":
            codes = np.frombuffer(data, np.uint8)
            return self._resampler.push(_TABLES[self._form][codes])
        joined = self._rest + data
        num_whole = len(joined) // 2 * 2
        self._rest = joined[num_whole:]
        samples = np.frombuffer(joined[:num_whole], "<i2")
        return self._resampler.push(samples.astype(np.float32) / np.float32(32768))

    def align(self) -> None:
        """Begin a sample with the next byte: half of one is never completed."""
        self._rest = b""


def _ulaw_table() -> Pcm:
    """The samples of the codes of G.711 mu-law (ITU-T G.711, table 2a)."""
    code = ~np.arange(256) & 0xFF
    magnitude = ((((code & 0x0F) << 3) + 0x84) << ((code & 0x70) >> 4)) - 0x84
    return (np.where(code & 0x80, -magnitude, magnitude) / 32768).astype(np.float32)


def _alaw_table() -> Pcm:
    """The samples of the codes of G.711 A-law (ITU-T G.711, table 1a)."""
    code = np.arange(256) ^ 0x55
    exponent, mantissa = (code & 0x70) >> 4, (code & 0x0F) << 4
    magnitude = np.where(
        exponent == 0, mantissa + 8, (mantissa + 0x108) << np.maximum(exponent - 1, 0)
    )
    return (np.where(code & 0x80, magnitude, -magnitude) / 32768).astype(np.float32)


_TABLES = {"g711_ulaw": _ulaw_table(), "g711_alaw": _alaw_table()}
