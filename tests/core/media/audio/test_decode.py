"""Clips read through decode children are what they are when read here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from support.audio_signals import sweep
from triptych.core.errors import InvalidRequest, PayloadTooLarge, RequestError, UnsupportedMedia
from triptych.core.media.audio import decode
from triptych.core.media.audio.containers import encode_clip
from triptych.core.media.audio.decode import ClipReader
from triptych.core.media.audio.intake import VOICE_LIMITS, ClipLimits, read_clip
from triptych.core.media.child import DecodePool

RATE = 24_000

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reader() -> AsyncIterator[ClipReader]:
    pool = DecodePool([decode.__name__])
    yield ClipReader(pool)
    await pool.close()


@pytest.mark.parametrize("kind", ["wav", "flac", "opus", "mp3", "aac"])
async def test_a_clip_is_the_same_read_there_or_here(reader: ClipReader, kind: str) -> None:
    data = encode_clip(kind, RATE, sweep(RATE, RATE))
    there_S = await reader.read(bytearray(data), sample_rate=16_000, limits=VOICE_LIMITS)
    here_S = read_clip(data, sample_rate=16_000, limits=VOICE_LIMITS)
    assert there_S.dtype == np.float32
    np.testing.assert_array_equal(there_S, here_S)


async def test_a_long_clip_comes_back_whole(reader: ClipReader) -> None:
    sound_S = np.random.default_rng(0).uniform(-1, 1, RATE * 600).astype(np.float32)
    data = encode_clip("wav", RATE, sound_S)
    limits = ClipLimits(max_bytes=2**26, max_seconds=600)
    with pytest.raises(PayloadTooLarge):  # the pool's own bound
        await reader.read(data, sample_rate=RATE, limits=limits)
    part_S = sound_S[: RATE * 100]
    data = encode_clip("wav", RATE, part_S)
    read_S = await reader.read(data, sample_rate=48_000, limits=limits)
    assert len(read_S) == 48_000 * 100


@pytest.mark.parametrize(
    ("data", "limits", "kind", "message"),
    [
        (b"", VOICE_LIMITS, InvalidRequest, "empty"),
        (b"MZ" * 100, VOICE_LIMITS, UnsupportedMedia, "supported audio format"),
        (bytes(100), ClipLimits(max_bytes=99, max_seconds=1), PayloadTooLarge, "larger than"),
        (
            encode_clip("wav", RATE, np.ones(RATE * 2, np.float32)),
            ClipLimits(max_bytes=2**20, max_seconds=1),
            PayloadTooLarge,
            "longer than 1 s",
        ),
    ],
)
async def test_a_refusal_crosses_as_it_is(
    reader: ClipReader, data: bytes, limits: ClipLimits, kind: type[RequestError], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        await reader.read(data, sample_rate=RATE, limits=limits)
    assert (type(caught.value), caught.value.param) == (kind, "file")


async def test_a_child_loads_what_it_needs_and_no_more() -> None:
    program = (
        "import sys, triptych.core.media.worker; from triptych.core.media.audio import decode;"
        "decode.prepare(); print(*{name.split('.')[0] for name in sys.modules})"
    )
    run = subprocess.run(  # noqa: ASYNC221 - nothing else runs
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    unwanted = {"torch", "torchaudio", "transformers", "fastapi", "starlette", "pydantic", "zmq"}
    assert not set(run.stdout.split()) & unwanted
