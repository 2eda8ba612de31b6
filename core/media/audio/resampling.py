"""A resampler for a stream of mono samples, without seams between its chunks.

Owns the resampler state of a stream. Knows neither containers nor models. The filter is
libswresample's windowed sinc; it holds back at most 50 samples of the faster rate. PyAV is imported
where it is used, so sound that is neither resampled nor compressed does not load it.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import av

Pcm = npt.NDArray[np.float32]
"""Mono samples [S]; full scale is -1 to 1."""

_EMPTY: Pcm = np.zeros(0, np.float32)


def audio_frame(
    samples: Pcm | npt.NDArray[np.int16], sample_format: str, sample_rate: int, start: int
) -> av.AudioFrame:
    """Wrap mono `samples` [S], beginning at sample `start` of their stream."""
    import av

    frame = av.AudioFrame.from_ndarray(samples[None], format=sample_format, layout="mono")
    frame.sample_rate, frame.pts, frame.time_base = sample_rate, start, Fraction(1, sample_rate)
    return frame


class Resampler:
    """One mono stream from `source_rate` to `target_rate` (Hz).

    The output does not depend on chunk boundaries, starts where the input starts, and is
    `round(num_samples * target_rate / source_rate)` samples long. Equal rates pass through.
    """

    def __init__(self, source_rate: int, target_rate: int) -> None:
        self.target_rate = target_rate
        self._source_rate = source_rate
        self._filter: _RateFilter | None = None
        if source_rate != target_rate:
            self._filter = _RateFilter(source_rate, target_rate)
        self._num_in = self._num_out = 0

    def target_length(self, num_samples: int) -> int:
        """The number of output samples for `num_samples` input samples."""
        return (2 * num_samples * self.target_rate + self._source_rate) // (2 * self._source_rate)

    def push(self, pcm_S: Pcm) -> Pcm:
        """Take the next samples, any number of them, and return what is ready."""
        if self._filter is None or not len(pcm_S):
            return pcm_S
        frame = audio_frame(pcm_S, "flt", self._source_rate, self._num_in)
        self._num_in += len(pcm_S)
        return self._count(self._filter.resample(frame))

    def flush(self) -> Pcm:
        """End the stream and return its tail."""
        if self._filter is None or not self._num_in:
            return _EMPTY
        num_left = self.target_length(self._num_in) - self._num_out
        tail = self._count(self._filter.resample(None))[:num_left]
        return np.pad(tail, (0, num_left - len(tail)))

    def _count(self, frames: Iterable[av.AudioFrame]) -> Pcm:
        pcm = np.concatenate([_EMPTY, *(frame.to_ndarray()[0] for frame in frames)])
        self._num_out += len(pcm)
        return pcm


class _RateFilter:
    """PyAV's `AudioResampler` without its threads: each would have one per processor."""

    def __init__(self, source_rate: int, target_rate: int) -> None:
        import av.filter

        self._graph = av.filter.Graph()
        self._graph.threads = 1
        forms = {"sample_fmts": "flt", "channel_layouts": "mono", "sample_rates": str(target_rate)}
        source = self._graph.add(
            "abuffer",
            sample_rate=str(source_rate),
            sample_fmt="flt",
            channel_layout="mono",
            time_base=f"1/{source_rate}",
        )
        nodes = (source, self._graph.add("aformat", **forms), self._graph.add("abuffersink"))
        self._graph.link_nodes(*nodes).configure()

    def resample(self, frame: av.AudioFrame | None) -> Iterable[av.AudioFrame]:
        """Filter a frame; `None` ends the stream."""
        import av

        self._graph.push(frame)
        while True:
            try:
                pulled = self._graph.pull()
            except (av.BlockingIOError, av.EOFError):  # it wants more, or is at its end
                return
            assert isinstance(pulled, av.AudioFrame)
            yield pulled
