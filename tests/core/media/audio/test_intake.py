"""Uploaded clips, honest and hostile."""

from __future__ import annotations

import io
import struct
import tracemalloc
from fractions import Fraction

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from support.audio_signals import babble, sweep, wav_bytes
from triptych.core.errors import InvalidRequest, PayloadTooLarge, RequestError, UnsupportedMedia
from triptych.core.media.audio.containers import encode_clip, open_encoder
from triptych.core.media.audio.framing import OggOpusPages
from triptych.core.media.audio.intake import (
    VOICE_LIMITS,
    ClipLimits,
    check_voice,
    read_clip,
    stream_clip,
)

RATE = 24000
LIMITS = ClipLimits(max_bytes=2**20, max_seconds=2)


def pcm16(pcm_S: np.ndarray) -> np.ndarray:
    return np.rint(pcm_S * 32767)[:, None]


def container_bytes(kind: str, codec: str, pcm_S: np.ndarray, layout: str = "mono") -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=48000, layout=layout)
        channels = np.repeat(pcm_S, av.AudioLayout(layout).nb_channels)[None]
        frame = av.AudioFrame.from_ndarray(channels, format="flt", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = 48000, 0, Fraction(1, 48000)
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("kind", ["wav", "flac", "opus", "mp3", "aac"])
def test_own_containers_are_read_back(kind):
    pcm_S = sweep(RATE, RATE)
    for data in (encode_clip(kind, RATE, pcm_S), open_stream(kind, pcm_S)):
        read_S = read_clip(data, sample_rate=RATE, limits=LIMITS)
        start = 1024 if kind == "aac" else 0
        assert read_S.dtype == np.float32
        assert np.corrcoef(read_S[start : start + RATE], pcm_S)[0, 1] > 0.99


def open_stream(kind: str, pcm_S: np.ndarray) -> bytes:
    encoder = open_encoder(kind, RATE)
    return encoder.encode(pcm_S) + encoder.finish()


@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "aac"), ("ipod", "aac"), ("webm", "libopus"), ("matroska", "flac")]
)
def test_containers_of_phones_and_browsers_are_read(kind, codec):
    pcm_S = sweep(48000, 48000)
    read_S = read_clip(container_bytes(kind, codec, pcm_S), sample_rate=48000, limits=LIMITS)
    assert abs(len(read_S) - 48000) <= 1024
    assert np.corrcoef(read_S[:40000], pcm_S[:40000])[0, 1] > 0.99


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
def test_all_sample_types_have_the_same_full_scale(subtype):
    pcm_S, file = sweep(8000, 16000), io.BytesIO()
    soundfile.write(file, pcm_S, 16000, subtype=subtype, format="WAV")
    read_S = read_clip(file.getvalue(), sample_rate=16000, limits=LIMITS)
    np.testing.assert_allclose(read_S, pcm_S, atol=0.01 if subtype == "PCM_U8" else 1e-4)


@pytest.mark.parametrize("num_channels", [1, 2, 3, 6, 8])
def test_channels_are_averaged(num_channels):
    pcm_S = sweep(8000, 16000)
    samples = np.tile(pcm16(pcm_S), (1, num_channels))
    read_S = read_clip(wav_bytes(samples, 16000), sample_rate=16000, limits=LIMITS)
    np.testing.assert_allclose(read_S, pcm_S, atol=1e-4)


def test_the_rate_is_changed_to_the_wanted_one():
    read_S = read_clip(
        wav_bytes(pcm16(sweep(44100, 44100)), 44100), sample_rate=RATE, limits=LIMITS
    )
    assert len(read_S) == RATE
    assert np.corrcoef(read_S, sweep(RATE, RATE))[0, 1] > 0.999


def read_until_refused(data: bytes, limits: ClipLimits) -> tuple[int, int]:
    """Samples that came before the clip was refused for its length, and the most memory taken."""
    pieces = stream_clip(data, sample_rate=RATE, limits=limits)
    sizes: list[int] = []
    tracemalloc.start()
    with pytest.raises(PayloadTooLarge):
        sizes.extend(len(pcm_S) for pcm_S in pieces)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return sum(sizes), peak_bytes


def opus_file(packet: bytes, num_packets: int) -> bytes:
    """The same packet over and over."""
    pages = OggOpusPages()
    head = pages.header(b"OpusHead\x01\x01" + struct.pack("<HIhB", 312, 8000, 0, 0))
    starts = range(0, num_packets, 250)
    return head + b"".join(pages.page([packet] * 250, (start + 250) * 2880) for start in starts)


def test_hours_in_a_small_opus_file_stop_at_the_budget():
    data = opus_file(b"\x18", 522_000)  # 8.7 hours: 60 ms in each packet of one byte
    limits = ClipLimits(max_bytes=25 * 2**20, max_seconds=30)
    num_samples, peak_bytes = read_until_refused(data, limits)
    assert len(data) < 3 * 2**20
    assert 29 * RATE < num_samples <= 30 * RATE
    assert peak_bytes < len(data) + 2**20  # the reader's own copy, and a few frames


@pytest.mark.parametrize("kind", ["flac", "mp3", "wav"])
def test_long_clips_stop_at_the_budget(kind):
    data = encode_clip(kind, 8000, np.zeros(8000 * 20, np.float32))
    num_samples, _ = read_until_refused(data, LIMITS)
    assert num_samples <= 2 * RATE


@pytest.mark.parametrize("rate", [0, 1, 100, 7999, 192_001, 4_000_000_000, 2**32 - 1])
def test_a_forged_sample_rate_is_refused(rate):
    data = bytearray(wav_bytes(pcm16(sweep(8000, 16000)), 16000))
    data[24:28] = struct.pack("<I", rate)
    with pytest.raises(InvalidRequest):
        read_clip(bytes(data), sample_rate=RATE, limits=LIMITS)


@pytest.mark.parametrize("num_channels", [0, 9, 255, 65535])
def test_a_forged_channel_count_is_refused(num_channels):
    data = bytearray(wav_bytes(np.zeros((70000, 2)), 16000))
    data[22:24] = struct.pack("<H", num_channels)
    data[32:34] = struct.pack("<H", 2 * num_channels % 2**16)
    with pytest.raises(InvalidRequest):
        read_clip(bytes(data), sample_rate=RATE, limits=LIMITS)


def test_a_lying_length_changes_nothing():
    data = bytearray(wav_bytes(pcm16(sweep(8000, 16000)), 16000))
    data[40:44] = b"\xff\xff\xff\x7f"
    assert len(read_clip(bytes(data), sample_rate=16000, limits=LIMITS)) == 8000


def test_a_file_over_the_byte_limit_is_not_opened():
    with pytest.raises(PayloadTooLarge, match="1 MiB"):
        read_clip(bytes(2**20 + 1), sample_rate=RATE, limits=LIMITS)


def test_a_flood_of_broken_packets_is_cut_short():
    data = opus_file(b"\x03", 100_000)  # that promise a frame count and end
    with pytest.raises(InvalidRequest, match="damaged"):
        read_clip(data, sample_rate=RATE, limits=LIMITS)


@pytest.mark.parametrize(
    "data",
    [
        b"#EXTM3U\n#EXTINF:1\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"<?xml version='1.0'?><MPD/>",
        b"\x89PNG\r\n\x1a\n" + bytes(64),
        b"RIFF\x00\x00\x00\x00AVI " + bytes(64),
        b"MThd\x00\x00\x00\x06",
        b"x",
        bytes(4096),
    ],
)
def test_other_files_are_named_as_such(data):
    with pytest.raises(UnsupportedMedia, match="wav, flac, ogg"):
        read_clip(data, sample_rate=RATE, limits=LIMITS)


def test_a_film_without_sound_is_refused():
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width = stream.height = 16
        stream.pix_fmt = "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((24, 16), np.uint8), format="yuv420p")
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(InvalidRequest, match="no audio stream"):
        read_clip(file.getvalue(), sample_rate=RATE, limits=LIMITS)


@pytest.mark.parametrize(("kind", "codec"), [("ipod", "alac"), ("wav", "adpcm_yamaha")])
def test_a_codec_outside_the_list_is_named(kind, codec):
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=48000, layout="mono")
        data = np.rint(sweep(8192, 48000)[None] * 32767).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(data, format="s16p", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 48000, 0, Fraction(1, 48000)
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(UnsupportedMedia, match=f"codec {codec} .* Or send flac"):
        read_clip(file.getvalue(), sample_rate=RATE, limits=LIMITS)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_numbers_are_refused(value):
    samples, file = sweep(8000, 16000), io.BytesIO()
    samples[5000] = value
    soundfile.write(file, samples, 16000, subtype="FLOAT", format="WAV")
    with pytest.raises(InvalidRequest, match="not finite numbers"):
        read_clip(file.getvalue(), sample_rate=RATE, limits=LIMITS)


@pytest.mark.parametrize("subtype", ["FLOAT", "DOUBLE"])
@pytest.mark.parametrize("value", [1e38, -1e38, 32767.0])
def test_floats_of_another_scale_are_named(subtype, value):
    file = io.BytesIO()
    soundfile.write(file, np.full(8000, value), 16000, subtype=subtype, format="WAV")
    with pytest.raises(InvalidRequest, match="full scale is 1"):
        read_clip(file.getvalue(), sample_rate=RATE, limits=LIMITS)


def test_floats_a_little_too_loud_are_clipped():
    file = io.BytesIO()
    soundfile.write(file, 3 * sweep(8000, 16000), 16000, subtype="FLOAT", format="WAV")
    assert np.abs(read_clip(file.getvalue(), sample_rate=16000, limits=LIMITS)).max() == 1


@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_a_file_cut_short_is_refused(kind):
    data = encode_clip(kind, RATE, babble(RATE, RATE))
    assert len(read_clip(data, sample_rate=RATE, limits=LIMITS)) == RATE
    for end in (len(data) // 10, len(data) // 2, len(data) - 1):
        with pytest.raises(InvalidRequest, match=r"cut short|damaged"):
            read_clip(data[:end], sample_rate=RATE, limits=LIMITS)


@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_a_stream_of_unknown_length_is_read_to_its_end(kind):
    data = open_stream(kind, babble(RATE, RATE))
    assert 0 < len(read_clip(data[: len(data) // 2], sample_rate=RATE, limits=LIMITS)) < RATE


@pytest.mark.parametrize("mark", [0x7FFF_FFFF, 0x7FFF_F024, 0xFFFF_FFFF])
def test_chunks_before_and_after_the_sound_and_marks_of_streams_are_no_cut(mark):
    head = wav_bytes(pcm16(sweep(8000, 16000)), 16000)
    extra = b"JUNK" + struct.pack("<I", 3) + b"abc\0"
    whole = head[:36] + extra + head[36:] + extra
    assert len(read_clip(whole, sample_rate=16000, limits=LIMITS)) == 8000
    streamed = head[:40] + struct.pack("<I", mark) + head[44:]
    assert len(read_clip(streamed, sample_rate=16000, limits=LIMITS)) == 8000


@pytest.mark.parametrize("data", [b"", wav_bytes(np.zeros((0, 1)), RATE)])
def test_a_clip_of_no_length_is_refused(data):
    with pytest.raises(InvalidRequest):
        read_clip(data, sample_rate=RATE, limits=VOICE_LIMITS)


@pytest.mark.parametrize(
    ("pcm_S", "message"),
    [
        (np.zeros(0, np.float32), "at least 1 s"),
        (np.ones(1, np.float32), "at least 1 s"),
        (babble(RATE - 1, RATE), "at least 1 s"),
        (np.zeros(2 * RATE, np.float32), "silent"),
        (np.full(2 * RATE, 0.7, np.float32), "silent"),
        (1e-4 * babble(2 * RATE, RATE), "silent"),
        (np.pad(babble(4000, RATE), (0, 2 * RATE)), "silent"),
    ],
)
def test_clip_without_a_voice_is_refused(pcm_S, message):
    with pytest.raises(InvalidRequest, match=message):
        check_voice(pcm_S, RATE)


def test_a_voice_with_pauses_is_taken():
    check_voice(np.pad(babble(RATE, RATE), RATE), RATE)


@pytest.mark.parametrize("layout", ["stereo", "5.1", "6.1", "7.1"])
@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "aac"), ("webm", "libopus"), ("matroska", "flac")]
)
def test_many_channels_are_averaged(kind, codec, layout):
    pcm_S = sweep(48000, 48000)
    read_S = read_clip(
        container_bytes(kind, codec, pcm_S, layout), sample_rate=48000, limits=LIMITS
    )
    alone_S = read_clip(container_bytes(kind, codec, pcm_S), sample_rate=48000, limits=LIMITS)
    length = min(len(read_S), len(alone_S))
    assert np.corrcoef(read_S[:length], alone_S[:length])[0, 1] > 0.95


SEEDS = {
    kind: encode_clip(kind, RATE, babble(2400, RATE)) for kind in ("wav", "flac", "opus", "mp3")
} | {
    f"mp4 {layout}": container_bytes("mp4", "aac", sweep(4800, 48000), layout)
    for layout in ("mono", "7.1")
}


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(SEEDS)),
    edits=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=12),
    cut=st.integers(0, 2**13),
)
def test_damaged_files_are_read_or_refused_never_worse(kind, edits, cut):
    data = bytearray(SEEDS[kind])
    for position, value in edits:
        data[position % len(data)] = value
    del data[max(len(data) - cut, 0) :]
    try:
        read_S = read_clip(bytes(data), sample_rate=RATE, limits=LIMITS)
    except RequestError:
        return
    assert np.isfinite(read_S).all()
    assert len(read_S) <= 2 * RATE


def wav_file(pcm_S: np.ndarray, size: int, kind: bytes = b"RIFF", size_64: int = 0) -> bytes:
    """A WAV that promises `size` bytes of samples; RF64 says it in a chunk of its own."""
    samples = pcm16(pcm_S).astype("<i2").tobytes()
    whole = struct.pack("<4sI4s", kind, min(size + 36, 2**32 - 1), b"WAVE")
    if kind == b"RF64":
        whole += struct.pack("<4sIQQQI", b"ds64", 28, size_64 + 72, size_64, 0, 0)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, 16000, 32000, 2, 16)
    return whole + form + struct.pack("<4sI", b"data", size) + samples


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.just(0),
        st.integers(25 * 2**20 + 1, 2**32 - 1),
        st.sampled_from([2_000_000_000, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFE, 0x7FFF_F000]),
    )
)
def test_a_promise_beyond_any_upload_is_no_promise(size):
    read_S = read_clip(wav_file(sweep(8000, 16000), size), sample_rate=16000, limits=LIMITS)
    assert len(read_S) == 8000


@settings(max_examples=30, deadline=None)
@given(st.integers(16_001, 25 * 2**20))
def test_a_promise_that_an_upload_could_keep_is_one(size):
    with pytest.raises(InvalidRequest, match="cut short"):
        read_clip(wav_file(sweep(8000, 16000), size), sample_rate=16000, limits=LIMITS)


@pytest.mark.parametrize("size_64", [16_000, 2**33, 2**40])
def test_rf64_is_read(size_64):
    data = wav_file(sweep(8000, 16000), 0xFFFF_FFFF, b"RF64", size_64)
    assert len(read_clip(data, sample_rate=16000, limits=LIMITS)) == 8000


def test_rf64_cut_short_is_refused():
    data = wav_file(sweep(8000, 16000), 0xFFFF_FFFF, b"RF64", 20_000)
    with pytest.raises(InvalidRequest, match="cut short"):
        read_clip(data, sample_rate=16000, limits=LIMITS)


@pytest.mark.parametrize("subtype", ["IMA_ADPCM", "MS_ADPCM", "GSM610", "ALAW", "ULAW"])
def test_telephone_codecs_in_wav_are_read(subtype):
    file, pcm_S = io.BytesIO(), sweep(8000, 8000) / 2
    soundfile.write(file, pcm_S, 8000, subtype=subtype, format="WAV")
    read_S = read_clip(file.getvalue(), sample_rate=8000, limits=LIMITS)
    length = min(len(read_S), len(pcm_S))
    assert length >= 7900
    assert np.corrcoef(read_S[:2000], pcm_S[:2000])[0, 1] > 0.9


@pytest.mark.parametrize("gain", [1.0, 0.01])
@pytest.mark.parametrize("subtype", ["PCM_16", "FLOAT"])
def test_opposite_phase_is_not_silence(gain, subtype):
    pcm_S, file = gain * sweep(8000, 16000), io.BytesIO()
    soundfile.write(file, np.stack((pcm_S, -pcm_S), 1), 16000, subtype=subtype, format="WAV")
    read_S = read_clip(file.getvalue(), sample_rate=16000, limits=LIMITS)
    np.testing.assert_allclose(read_S, pcm_S, atol=1e-4)


def test_other_stereo_is_the_mean():
    pcm_S, other_S = sweep(8000, 16000), babble(8000, 16000)
    file = io.BytesIO()
    soundfile.write(file, np.stack((pcm_S, other_S), 1), 16000, subtype="FLOAT", format="WAV")
    read_S = read_clip(file.getvalue(), sample_rate=16000, limits=LIMITS)
    np.testing.assert_allclose(read_S, (pcm_S + other_S) / 2, atol=1e-4)
