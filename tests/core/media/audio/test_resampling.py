"""Streams of sound at another rate: the library's own filter, without its threads."""

from __future__ import annotations

import av
import numpy as np
import psutil

from triptych.core.media.audio.resampling import Resampler, audio_frame


def test_a_stream_is_filtered_as_by_the_library_and_starts_no_thread() -> None:
    pcm_S = np.random.default_rng(0).standard_normal(24_000).astype(np.float32)
    frame = audio_frame(pcm_S, "flt", 24_000, 0)
    library = av.AudioResampler(format="flt", layout="mono", rate=16_000)
    frames = [*library.resample(frame), *library.resample(None)]
    expected_S = np.concatenate([each.to_ndarray()[0] for each in frames])
    del library
    num_before = psutil.Process().num_threads()
    resampler = Resampler(24_000, 16_000)
    pieces = [resampler.push(pcm_S[:5000]), resampler.push(pcm_S[5000:]), resampler.flush()]
    assert psutil.Process().num_threads() == num_before
    np.testing.assert_array_equal(np.concatenate(pieces), expected_S)
