"""When words are spoken in a sound, found without the voice that spoke it and without a recognizer.

Owns a forced alignment by PocketSphinx (a hidden Markov model of phones, whose wheel has its
weights), in steps of 10 ms, and the onsets of hissing words ("ship", "salt"), which are visible in
the sound. Knows no model of ours.

Shapes: S samples, F frames of 5 ms, N samples of a window.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Sound = NDArray[np.float32]
Times = tuple[float, float]
TimedWord = tuple[str, Times]

ALIGNER_RATE = 16_000
_FRAMES_PER_S = 200
_HISS_HZ, _LEAST_HISS_S = 4000, 0.04
_SEARCH_S = (0.15, 0.25)
_MARGIN, _NOISE = 4000, 1e-4
_NUM_TRIES = 12


class Aligner:
    """Finds given words in a sound. Needs the package `pocketsphinx`."""

    def __init__(self) -> None:
        sphinx = importlib.import_module("pocketsphinx")
        self._decoder: Any = sphinx.Decoder(lm=None, loglevel="FATAL")

    def __call__(self, sound_S: Sound, words: Sequence[str]) -> list[TimedWord]:
        """The times of `words`, lower case, in a sound of 16 kHz; none if they are not found.

        The search loses some sounds: it is repeated with other silence around them.
        """
        for number in range(_NUM_TRIES):
            margin = _MARGIN + 160 * number
            noise_S = np.random.default_rng(number).normal(0, _NOISE, len(sound_S) + 2 * margin)
            try:
                padded_S = (np.pad(sound_S, margin) + noise_S).astype(np.float32)
                return self._align(padded_S, words, margin)
            except RuntimeError:
                continue
        return []

    def _align(self, sound_S: Sound, words: Sequence[str], margin: int) -> list[TimedWord]:
        decoder = self._decoder
        pcm = (sound_S.clip(-1, 1) * 32767).astype("<i2").tobytes()
        decoder.set_align_text(" ".join(words))
        self._decode(pcm)
        decoder.set_alignment()  # now its states, which are more exact
        self._decode(pcm)
        start_s = margin / ALIGNER_RATE
        return [
            (
                each.name.split("(")[0],
                (each.start / 100 - start_s, (each.start + each.duration) / 100 - start_s),
            )
            for each in decoder.get_alignment()
            if not each.name.startswith("<")
        ]

    def _decode(self, pcm: bytes) -> None:
        self._decoder.start_utt()
        self._decoder.process_raw(pcm, full_utt=True)
        self._decoder.end_utt()


def hisses(sound_S: Sound, rate: int, words: Sequence[TimedWord]) -> Iterator[tuple[int, float]]:
    """Which words begin with a hiss after another sound, and when the hiss begins in seconds.

    The given times of words say where to look.
    """
    level_F = _hiss_level(sound_S, rate)
    for at in range(1, len(words)):
        word, before = words[at][0], words[at - 1][0]
        is_hiss = word.startswith(("s", "ch")) and not before.endswith(
            ("s", "z", "x", "t", "h", "ce", "se", "ge", "ze")
        )
        onset_s = _onset_s(level_F, words[at][1][0]) if is_hiss else None
        if onset_s is not None:
            yield at, onset_s


def _hiss_level(sound_S: Sound, rate: int) -> NDArray[np.float64]:
    """The energy above 4 kHz in decibels, in windows of 10 ms around each frame's start."""
    hop = rate // _FRAMES_PER_S
    padded_S = np.pad(sound_S.astype(np.float64), hop)
    windows_FN = np.lib.stride_tricks.sliding_window_view(padded_S, 2 * hop)[::hop]
    power = np.abs(np.fft.rfft(windows_FN * np.hanning(2 * hop))) ** 2
    is_high = np.fft.rfftfreq(2 * hop, 1 / rate) > _HISS_HZ
    level_F: NDArray[np.float64] = 10 * np.log10(power[:, is_high].sum(axis=1) + 1e-9)
    return level_F


def _onset_s(level_F: NDArray[np.float64], near_s: float) -> float | None:
    """Where the longest stretch above the middle between quiet and loud begins."""
    first = max(0, int((near_s - _SEARCH_S[0]) * _FRAMES_PER_S))
    near_F = level_F[first : int((near_s + _SEARCH_S[1]) * _FRAMES_PER_S)]
    quiet, loud = np.percentile(near_F, (10, 95))
    is_loud = np.concatenate(([False], near_F > (quiet + loud) / 2, [False]))
    starts, ends = np.flatnonzero(np.diff(is_loud.astype(int))).reshape(-1, 2).T
    longest = int((ends - starts).argmax())
    if starts[longest] == 0 or ends[longest] - starts[longest] < _LEAST_HISS_S * _FRAMES_PER_S:
        return None
    return float(first + starts[longest]) / _FRAMES_PER_S
