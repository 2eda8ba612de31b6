"""Recordings made to harm: each is read or refused, opens nothing else, and takes no more."""

from __future__ import annotations

import asyncio
import io
import random
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import psutil
import pytest
import pytest_asyncio

from support.child_processes import decoders
from support.voices_app import DECODE, RATE, recording
from triptych.core.errors import RequestError, UnsupportedMedia
from triptych.core.media.audio.containers import encode_clip
from triptych.core.media.audio.decode import ClipReader
from triptych.core.media.audio.intake import ClipLimits, read_clip
from triptych.core.media.audio.resampling import Pcm
from triptych.core.media.child import DecodeLimits, DecodePool

LIMITS = ClipLimits(max_bytes=2**20, max_seconds=10)
TONE_S = (0.3 * np.sin(np.arange(RATE) / 20)).astype(np.float32)
NUM_MUTANTS = 40


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[DecodePool]:
    limits = DecodeLimits(memory_bytes=64 * 2**20, num_requests_per_child=10**6)
    pool = DecodePool([DECODE], limits=limits)
    yield pool
    await pool.close()


class Canary:
    """A file and a port that must not be touched."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "canary.wav"
        self.file.write_bytes(recording())
        self._port = socket.create_server(("127.0.0.1", 0))
        self._port.settimeout(0)
        self.url = f"http://127.0.0.1:{self._port.getsockname()[1]}/canary.wav"

    def is_quiet(self) -> bool:
        try:
            self._port.accept()
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        self._port.close()


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Canary]:
    canary = Canary(tmp_path)
    yield canary
    canary.close()


PLAYLISTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{0}\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile '{0}'\n",
    "concat protocol": "concat:{0}|{0}",
    "subfile": "subfile,,start,0,end,0,,:{0}",
    "dash": "<?xml version='1.0'?><MPD><Period><BaseURL>{0}</BaseURL></Period></MPD>",
    "pls": "[playlist]\nFile1={0}\nNumberOfEntries=1\n",
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=audio 9 RTP/AVP 0\n",
    "asx": "<ASX VERSION='3.0'><ENTRY><REF HREF='{0}'/></ENTRY></ASX>",
    "svg": "<svg xmlns:xlink='x'><image xlink:href='{0}'/></svg>",
    "lavfi": "amovie={0}",
    "url": "{0}",
}
MAGICS = {
    "bare": b"",
    "wav": b"RIFF\xff\xff\xff\x7fWAVE",
    "mp3": b"ID3\x04\x00\x00\x00\x00\x00\x00",
    "flac": b"fLaC",
    "ogg": b"OggS",
    "mov": b"\x00\x00\x00\x10ftypM4A \x00\x00\x00\x00",
    "matroska": b"\x1aE\xdf\xa3",
    "aac": b"\xff\xf1",
}


@pytest.mark.parametrize("magic", MAGICS)
@pytest.mark.parametrize("playlist", PLAYLISTS)
def test_no_playlist_is_followed(canary: Canary, magic: str, playlist: str) -> None:
    for place in (canary.url, canary.file.as_uri(), str(canary.file)):
        data = MAGICS[magic] + PLAYLISTS[playlist].format(place).encode() * 20
        with pytest.raises(RequestError):  # in this process: the reader itself must refuse
            read_clip(data, sample_rate=RATE, limits=LIMITS)
    assert canary.is_quiet()


@pytest.mark.parametrize("magic", ["GIF89a", "PK\x03\x04", "%PDF-1.7", "MZ", "\x7fELF", "<html>"])
def test_other_kinds_of_files_are_not_opened(magic: str) -> None:
    with pytest.raises(UnsupportedMedia):
        read_clip(magic.encode("latin-1") + bytes(1000), sample_rate=RATE, limits=LIMITS)


def boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Kind, start and end of each MP4 box between `start` and `end`."""
    while start + 8 <= end:
        size, kind = struct.unpack_from(">I4s", data, start)
        yield kind, start, start + size
        start += size


def with_reference(data: bytes, reference: bytes) -> bytes:
    """An MP4 file whose sound is said to be in another file: `reference` replaces its own."""
    path = [b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"]
    edited = bytearray(data)
    start, end, outer = 0, len(data), []
    for kind in path:
        start, end = next((at, to) for name, at, to in boxes(data, start, end) if name == kind)
        outer.append(start)
        start += 16 if kind == b"dref" else 8
    edited[start:end] = reference
    for at in outer:
        (size,) = struct.unpack_from(">I", data, at)
        struct.pack_into(">I", edited, at, size + len(reference) - (end - start))
    return bytes(edited)


def alias(path: str) -> bytes:
    """A QuickTime alias record that leads to `path`."""
    name = path.encode()
    record = bytearray(150)
    record += struct.pack(">hH", 2, len(name)) + name + b"\0" * (len(name) % 2)
    record += struct.pack(">hH", -1, 0)
    return struct.pack(">I4sI", 12 + len(record), b"alis", 0) + bytes(record)


def silenced(data: bytes) -> bytes:
    """An MP4 file with nothing left of its sound."""
    edited = bytearray(data)
    start, end = next((at, to) for kind, at, to in boxes(data, 0, len(data)) if kind == b"mdat")
    edited[start + 8 : end] = bytes(end - start - 8)
    return bytes(edited)


def test_sound_in_another_file_is_not_fetched(canary: Canary) -> None:
    whole = container("ipod", "aac", TONE_S)
    canary.file.write_bytes(whole)
    for place in (str(canary.file), canary.url, "../" * 9 + str(canary.file)):
        location = place.encode() + b"\0"
        url = struct.pack(">I4sI", 12 + len(location), b"url ", 0) + location
        for reference in (alias(place), url):
            assert not attempt(silenced(with_reference(whole, reference))).any()
    assert canary.is_quiet()


def test_such_a_file_would_do_harm_elsewhere(canary: Canary) -> None:
    whole = container("ipod", "aac", TONE_S)
    canary.file.write_bytes(whole)
    data = io.BytesIO(silenced(with_reference(whole, alias(str(canary.file)))))
    careless = {"enable_drefs": "1", "use_absolute_path": "1"}
    with av.open(data, format="mov", options=careless) as file:
        loudest = max(abs(frame.to_ndarray()).max() for frame in file.decode(audio=0))
    assert loudest > 0.2


def attempt(data: bytes) -> Pcm:
    try:
        return read_clip(data, sample_rate=RATE, limits=LIMITS)
    except RequestError:
        return np.zeros(0, np.float32)


def container(kind: str, codec: str, pcm_S: Pcm) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(pcm_S[None], format="flt", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = RATE, 0, Fraction(1, RATE)
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def real_files() -> dict[str, bytes]:
    files = {
        kind: encode_clip(kind, RATE, TONE_S) for kind in ("wav", "flac", "mp3", "opus", "aac")
    }
    return files | {
        "m4a": container("ipod", "aac", TONE_S),
        "webm": container("webm", "libopus", TONE_S),
        "mka": container("matroska", "flac", TONE_S),
    }


FILES = real_files()


def giants() -> Iterator[tuple[str, bytes]]:
    """Files that declare sizes they do not have."""
    for size in (0, 1, 7, 0x7FFFFFFF, 0xFFFFFFFF):
        wav = bytearray(FILES["wav"])
        struct.pack_into("<I", wav, 16, size)
        yield f"wav format of {size}", bytes(wav)
        mov = bytearray(FILES["m4a"])
        for kind, start, _ in boxes(bytes(mov), 0, len(mov)):
            if kind in (b"moov", b"mdat"):
                struct.pack_into(">I", mov, start, size)
        yield f"boxes of {size}", bytes(mov)
    for tag in (b"\x7f\x7f\x7f\x7f", b"\x00\x00\x7f\x7f"):
        yield f"a tag of {tag.hex()}", b"ID3\x04\x00\x00" + tag + FILES["mp3"]
    flac = bytearray(FILES["flac"])
    flac[8:12] = b"\xff" * 4  # block sizes
    flac[21:26] = b"\xff" * 5  # number of samples
    yield "flac blocks", bytes(flac)
    yield "flac metadata", b"fLaC\x7f\xff\xff\xff" + bytes(100)
    mkv = bytearray(FILES["mka"])
    segment = mkv.index(b"\x18\x53\x80\x67") + 4
    mkv[segment : segment + 8] = b"\x01" + b"\xff" * 7
    yield "a segment of unknown size", bytes(mkv)
    yield "an element of 2^56", b"\x1aE\xdf\xa3\x01" + b"\xfe" * 7 + bytes(100)
    image = b"\x00image/png\x00\x03\x00" + b"\x89PNG\r\n\x1a\n" + b"\xff" * 200
    frame = b"APIC" + struct.pack(">IH", len(image), 0) + image
    size = len(frame)
    synch = bytes((size >> shift) & 0x7F for shift in (21, 14, 7, 0))
    yield "a broken image", b"ID3\x03\x00\x00" + synch + frame + FILES["mp3"]


def nested() -> Iterator[tuple[str, bytes]]:
    """Files inside files, and files under another's name."""
    for outer, inner in (("wav", "mp3"), ("wav", "opus"), ("flac", "m4a"), ("mp3", "wav")):
        half = len(FILES[outer]) // 2
        yield f"{inner} in {outer}", FILES[outer][:half] + FILES[inner] + FILES[outer][half:]
        yield f"{inner} after {outer}", FILES[outer] + FILES[inner]
    for kind, magic in MAGICS.items():
        for name, data in FILES.items():
            yield f"{name} as {kind}", magic + data[len(magic) :]


def mutants(name: str) -> Iterator[tuple[str, bytes]]:
    draw = random.Random(name)
    for n in range(NUM_MUTANTS):
        data = bytearray(FILES[name])
        if n % 2:
            del data[draw.randrange(len(data)) :]
        for _ in range(draw.choice((0, 1, 4, 64))):
            if data:
                data[draw.randrange(min(len(data), draw.choice((64, 512, 10**9))))] = draw.choice(
                    (0, 0x7F, 0xFF, draw.randrange(256))
                )
        yield f"{name} {n}", bytes(data)


CORPORA = {"giants": giants, "nested": nested} | {
    name: lambda name=name: mutants(name) for name in FILES
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("corpus", CORPORA)
async def test_a_child_reads_or_refuses_whatever_it_is_given(
    pool: DecodePool, corpus: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader = ClipReader(pool)
    child, memory_bytes = await baseline(reader)
    for name, data in CORPORA[corpus]():
        try:
            pcm_S = await reader.read(data, sample_rate=16_000, limits=LIMITS)
        except RequestError:
            continue
        assert np.isfinite(pcm_S).all(), name
        assert np.abs(pcm_S).max() < 4, name  # a resampler overshoots at jumps
    assert child.is_running(), "a file crashed its child"
    assert peak_bytes(child) - memory_bytes < 48 * 2**20
    assert "could not be decoded" not in caplog.text, "a decoder raised what it should not"


async def baseline(reader: ClipReader) -> tuple[psutil.Process, int]:
    """The child that decodes, and what memory it takes for ordinary files."""
    for data in FILES.values():
        await reader.read(data, sample_rate=16_000, limits=LIMITS)
    (child,) = decoders()
    return child, peak_bytes(child)


def peak_bytes(child: psutil.Process) -> int:
    """The most memory the process has had."""
    lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.asyncio(loop_scope="module")
async def test_hostile_and_honest_files_share_a_child(pool: DecodePool) -> None:
    reader = ClipReader(pool)
    files = [data for _, data in mutants("mp3")]
    honest = recording()

    async def read(data: bytes) -> object:
        return await reader.read(data, sample_rate=RATE, limits=LIMITS)

    for start in range(0, len(files), 10):
        batch = [job for data in files[start : start + 10] for job in (read(data), read(honest))]
        results = await asyncio.gather(*batch, return_exceptions=True)
        assert all(isinstance(bad, np.ndarray | RequestError) for bad in results[::2])
        assert all(isinstance(good, np.ndarray) for good in results[1::2])
