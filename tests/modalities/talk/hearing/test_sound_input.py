"""Raw formats of realtime input: exact samples, and no seams between pieces."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import av
import numpy as np
import pytest

from triptych.modalities.talk.hearing.sound_input import SoundFormat, SoundInput


@pytest.mark.parametrize("form", get_args(SoundFormat))
def test_pieces_join_without_seams(form: SoundFormat) -> None:
    rng = np.random.default_rng(2)
    data = rng.integers(0, 256, 24_001, np.uint8).tobytes()
    whole = SoundInput(form).push(data)
    stream, cuts = SoundInput(form), [0, 1, 2, 7, 961, 12_000, len(data)]
    pieces = [stream.push(data[a:b]) for a, b in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert np.abs(whole).max() > 0.1


@pytest.mark.parametrize(("form", "codec"), [("g711_ulaw", "pcm_mulaw"), ("g711_alaw", "pcm_alaw")])
def test_codes_are_those_of_g711(form: SoundFormat, codec: str) -> None:
    from triptych.modalities.talk.hearing import sound_input

    context = av.CodecContext.create(codec, "r")
    assert isinstance(context, av.AudioCodecContext)
    context.sample_rate, context.layout = 8000, "mono"
    (frame,) = context.decode(av.Packet(bytes(range(256))))
    expected = frame.to_ndarray().reshape(-1) / 32768
    np.testing.assert_array_equal(sound_input._TABLES[form], expected.astype(np.float32))


def test_another_rate_of_pcm16() -> None:
    samples = np.arange(-100, 100, dtype="<i2")
    np.testing.assert_array_equal(
        SoundInput("pcm16", 16_000).push(samples.tobytes()), samples / np.float32(32768)
    )
