"""Images made to harm: each is refused at once, and takes no memory."""

from __future__ import annotations

import asyncio
import random
import zipfile
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from support.child_processes import decoders
from support.images import apng, hostile, image, saved, turned
from triptych.core.errors import RequestError
from triptych.core.media import images
from triptych.core.media.child import DecodeLimits, DecodePool
from triptych.core.media.images import ImageReader

CORPUS = hostile()
NUM_MUTANTS = 60
MIB = 2**20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[DecodePool]:
    # A file of the corpus gets a second of work: one that takes longer is refused, and fails.
    limits = DecodeLimits(cpu_s=1, num_requests_per_child=10**6)
    pool = DecodePool([images.__name__], limits=limits)
    yield pool
    await pool.close()


async def child_of(reader: ImageReader) -> psutil.Process:
    """The child, after it has read something ordinary of each kind."""
    for kind in ("png", "jpeg", "webp"):
        await reader.read(saved(image(256, 256), kind))
    (child,) = decoders()
    return child


def peak_bytes(child: psutil.Process) -> int:
    """The most memory the process has had."""
    lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.asyncio(loop_scope="module")
async def test_the_corpus_is_refused_before_any_raster(
    pool: DecodePool, caplog: pytest.LogCaptureFixture
) -> None:
    reader = ImageReader(pool)
    child = await child_of(reader)
    before_bytes = peak_bytes(child)
    for name, (data, status) in CORPUS.items():
        with pytest.raises(RequestError) as refused:
            await reader.read(data)
        assert refused.value.status == status, name
        assert "crash" not in refused.value.message, name
        assert "takes over" not in refused.value.message, name
    assert child.is_running()
    assert peak_bytes(child) - before_bytes < 8 * MIB
    assert not caplog.records


@pytest.mark.asyncio(loop_scope="module")
async def test_a_huge_animation_costs_its_first_image(pool: DecodePool) -> None:
    reader = ImageReader(pool)
    child = await child_of(reader)
    data = apng(40_000)
    before_bytes = peak_bytes(child)
    pixels = await reader.read(data)
    assert (pixels.width, pixels.height) == (64, 64)
    assert peak_bytes(child) - before_bytes < 3 * len(data) + 8 * MIB


@pytest.mark.asyncio(loop_scope="module")
async def test_of_a_file_that_is_two_things_only_pixels_remain(pool: DecodePool) -> None:
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("payload.txt", "secret payload")
    for kind in ("png", "jpeg", "webp"):
        data = saved(image(), kind) + archive.getvalue() + b"<script>alert(1)</script>"
        try:
            pixels = await ImageReader(pool).read(data)
        except RequestError:
            continue
        assert len(pixels.rgb) == 48 * 32 * 3
        assert b"payload" not in pixels.rgb


def mutants(kind: str) -> Iterator[bytes]:
    draw = random.Random(kind)
    whole = turned(kind, 6, 96, 64)
    for n in range(NUM_MUTANTS):
        data = bytearray(whole)
        if n % 3 == 0:
            del data[draw.randrange(len(data)) :]
        for _ in range(draw.choice((0, 1, 4, 64))):
            if data:
                at = draw.randrange(min(len(data), draw.choice((64, 512, 10**9))))
                data[at] = draw.choice((0, 0x7F, 0xFF, draw.randrange(256)))
        yield bytes(data)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
async def test_damaged_and_honest_images_share_a_child(
    pool: DecodePool, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader = ImageReader(pool)
    child = await child_of(reader)
    before_bytes = peak_bytes(child)
    honest = saved(image(), kind)
    for data in mutants(kind):
        bad, good = await asyncio.gather(
            reader.read(data), reader.read(honest), return_exceptions=True
        )
        assert not isinstance(bad, BaseException) or isinstance(bad, RequestError)
        assert not isinstance(good, BaseException)
    assert child.is_running(), "a file crashed its child"
    assert peak_bytes(child) - before_bytes < 64 * MIB
    assert "could not be decoded" not in caplog.text, "a decoder raised what it should not"
