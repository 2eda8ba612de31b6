"""Time stretch at constant pitch, for models that cannot change speed themselves.

Owns the time stretch. Knows neither containers nor models. The method is WSOLA: Verhelst and
Roelands, "An overlap-add technique based on waveform similarity (WSOLA) for high quality
time-scale modification of speech", ICASSP 1993. Windowed frames are placed at even steps in the
output; each is taken near its due point in the input, where it best continues the last frame.
"""

from __future__ import annotations

import numpy as np

from triptych.core.media.audio.resampling import Pcm

_STEP_S = 0.0125
"""Half a frame."""
_SEARCH_S = 0.01
"""Search range to each side: together one period of the lowest voice, 50 Hz."""
_DRIFT_COST = 1e-3
"""In units of correlation: prefers the candidate nearest to the due point."""


class TimeStretch:
    """One mono stream at `sample_rate` (Hz), played `speed` times as fast, 0.25 to 4.

    The output does not depend on chunk boundaries and is `round(num_samples / speed)` samples
    long. It holds back less than 48 ms of input.
    """

    def __init__(self, speed: float, sample_rate: int) -> None:
        assert 0.25 <= speed <= 4
        self._speed = speed
        self._step = round(_STEP_S * sample_rate)
        self._search = round(_SEARCH_S * sample_rate)
        self._window = np.hanning(2 * self._step + 1)[:-1].astype(np.float32)
        distance = np.abs(np.arange(-self._search, self._search + 1)) / self._search
        self._drift_cost = _DRIFT_COST * distance
        # Silence before the stream lets the first frames reach back like all others.
        self._origin = -(self._step + self._search)  # position of the buffer's first sample
        self._buffer: Pcm = np.zeros(-self._origin, np.float32)
        self._fade_out: Pcm = np.zeros(self._step, np.float32)
        self._last = -2 * self._step  # position of the last frame
        self._ready: Pcm = np.zeros(0, np.float32)
        self._num_frames = self._num_in = self._num_out = 0

    def push(self, pcm_S: Pcm) -> Pcm:
        """Take the next samples, any number of them, and return what is ready."""
        self._num_in += len(pcm_S)
        return self._take(self._extend(pcm_S))

    def flush(self) -> Pcm:
        """End the stream and return its tail."""
        return self._take(self._extend(np.zeros(2 * self._search + 4 * self._step, np.float32)))

    def _take(self, pcm_S: Pcm) -> Pcm:
        """The output that is due: a step may extend beyond the end for the input so far."""
        self._ready = np.concatenate([self._ready, pcm_S])
        num_due = round(self._num_in / self._speed) - self._num_out
        out_S, self._ready = self._ready[:num_due], self._ready[num_due:]
        self._num_out += len(out_S)
        return out_S

    @property
    def _due(self) -> int:
        """The input position of the next frame at an even pace."""
        if not self._num_frames:
            return -self._step
        return round((self._num_frames - 1) * self._step * self._speed)

    def _extend(self, pcm_S: Pcm) -> Pcm:
        self._buffer = np.concatenate([self._buffer, pcm_S])
        steps = [np.zeros(0, np.float32)]
        end = self._origin + len(self._buffer)
        while max(self._due + self._search, self._last + self._step) + len(self._window) <= end:
            steps.append(self._next_step())
        num_used = min(self._due - self._search, self._last + self._step) - self._origin
        self._buffer = self._buffer[num_used:].copy()
        self._origin = min(self._origin + num_used, end)
        return np.concatenate(steps)

    def _next_step(self) -> Pcm:
        """Overlap the next frame with the last; the first fades in from silence."""
        due = self._due
        self._last = due + self._best_shift(due)
        frame = self._frame(self._last, len(self._window)) * self._window
        step = self._fade_out + frame[: self._step]
        self._fade_out = frame[self._step :]
        self._num_frames += 1
        return step if self._num_frames > 1 else step[:0]

    def _best_shift(self, due: int) -> int:
        """The shift from `due` whose frame is most similar to the continuation of the last."""
        size = len(self._window)
        wanted = self._frame(self._last + self._step, size).astype(np.float64)
        candidates = self._frame(due - self._search, size + 2 * self._search).astype(np.float64)
        energy = np.concatenate([[0.0], np.cumsum(candidates**2)])
        norm = np.sqrt(np.maximum(energy[size:] - energy[:-size], 0) * np.dot(wanted, wanted))
        similarity = np.correlate(candidates, wanted, "valid") / (norm + 1e-9)
        return int(np.argmax(similarity - self._drift_cost)) - self._search

    def _frame(self, start: int, size: int) -> Pcm:
        return self._buffer[start - self._origin :][:size]
