"""Encoded streams, read by decoders that share no code with the encoder's framing."""

from __future__ import annotations

import io
import shutil
import subprocess
import tracemalloc
import wave

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.audio_signals import babble, decode_av, decode_soundfile, sweep
from triptych.core.errors import InvalidRequest
from triptych.core.media.audio.containers import FORMATS, encode_clip, open_encoder
from triptych.core.media.audio.resampling import Pcm, Resampler

CONTAINERS = [name for name in FORMATS if name != "pcm"]
AAC_DELAY = 1024
MP3_DELAY = 1105
FRAME = {"mp3": {24000: 576, 48000: 1152}, "aac": {24000: 1024, 48000: 1024}}


def encode(kind: str, sample_rate: int, pcm_S: Pcm, sizes: list[int]) -> bytes:
    encoder, start = open_encoder(kind, sample_rate), 0
    parts = []
    for size in [*sizes, len(pcm_S)]:
        parts.append(encoder.encode(pcm_S[start : start + size]))
        start += size
    return b"".join([*parts, encoder.finish()])


def aligned(kind: str, decoded_S: np.ndarray, num_samples: int) -> np.ndarray:
    """What a decoder gave, less the silence that only AAC cannot declare."""
    start = AAC_DELAY if kind == "aac" else 0
    return decoded_S[start : start + num_samples]


def correlation(a_S: np.ndarray, b_S: np.ndarray) -> float:
    assert len(a_S) == len(b_S)
    return float(np.corrcoef(a_S, b_S)[0, 1])


@pytest.mark.parametrize("signal", [sweep, babble])
@pytest.mark.parametrize("sample_rate", [24000, 48000])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_stream_sounds_like_its_input_in_time(kind, sample_rate, signal):
    num_samples = sample_rate + 77
    pcm_S = signal(num_samples, sample_rate)
    decoded_S, rate = decode_av(encode(kind, sample_rate, pcm_S, [3840] * 4), kind)
    frame = FRAME.get(kind, {}).get(sample_rate, 0)
    extra = AAC_DELAY if kind == "aac" else 0
    decoded_S = decoded_S[:: rate // sample_rate]  # Opus always decodes to 48 kHz
    assert 0 <= len(decoded_S) - extra - num_samples < max(frame, 1)
    assert correlation(aligned(kind, decoded_S, num_samples), pcm_S) > 0.99


@pytest.mark.parametrize("sample_rate", [8000, 16000, 22050, 24000, 44100, 48000])
@pytest.mark.parametrize("kind", ["mp3", "opus", "flac", "wav"])
def test_a_clip_of_known_length_comes_back_with_that_length(kind, sample_rate):
    pcm_S = babble(sample_rate // 2 + 13, sample_rate)
    data = encode_clip(kind, sample_rate, pcm_S)
    for decoded_S, rate in (decode_av(data, kind), decode_soundfile(data)):
        assert len(decoded_S) == pytest.approx(len(pcm_S) * rate / sample_rate, abs=2)
        wanted_S = np.interp(
            np.arange(len(decoded_S)) / rate * sample_rate, np.arange(len(pcm_S)), pcm_S
        )
        assert correlation(decoded_S, wanted_S) > 0.98


@pytest.mark.parametrize("kind", ["mp3", "opus", "wav"])
def test_libsndfile_decodes_the_stream(kind):
    pcm_S = sweep(24123, 24000)
    decoded_S, rate = decode_soundfile(encode(kind, 24000, pcm_S, [1000] * 9))
    # Without a frame count libsndfile ignores the delay that an MP3 declares.
    start = MP3_DELAY if kind == "mp3" else 0
    assert rate == 24000
    assert 0 <= len(decoded_S) - start - len(pcm_S) < (576 if kind == "mp3" else 1)
    assert correlation(decoded_S[start : start + len(pcm_S)], pcm_S) > 0.99


TOOLS = {
    "mp3": ["mpg123", "-q", "-s", "-"],
    "opus": ["opusdec", "--quiet", "--rate", "24000", "--force-stereo", "-", "-"],
    "flac": ["flac", "-dcs", "--force-raw-format", "--endian=little", "--sign=signed", "-"],
    "aac": ["ffmpeg", "-v", "error", "-i", "-", "-f", "s16le", "-"],
    "wav": ["sox", "-V0", "-t", "wav", "-", "-t", "s16", "-"],
}


@pytest.mark.parametrize("kind", TOOLS)
def test_command_line_players_decode_a_stream(kind):
    command = TOOLS[kind]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    pcm_S = sweep(24123, 24000)
    data = encode(kind, 24000, pcm_S, [700] * 20)
    run = subprocess.run(command, input=data, capture_output=True, check=True, timeout=30)
    decoded_S = np.frombuffer(run.stdout, "<i2")[:: 2 if kind == "opus" else 1] / 32768
    start = {"mp3": MP3_DELAY, "aac": AAC_DELAY}.get(kind, 0)
    # opusdec resamples to 24 kHz with a filter of its own
    assert correlation(decoded_S[start : start + len(pcm_S)], pcm_S) > 0.99
    assert 0 <= len(decoded_S) - start - len(pcm_S) < 1024


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from(FORMATS),
    sample_rate=st.sampled_from([24000, 22050]),
    sizes=st.lists(st.one_of(st.sampled_from([0, 1]), st.integers(0, 3000)), max_size=12),
)
def test_how_a_stream_is_cut_leaves_no_trace(kind, sample_rate, sizes):
    pcm_S = sweep(9001, sample_rate)
    cut, whole = encode(kind, sample_rate, pcm_S, sizes), encode(kind, sample_rate, pcm_S, [])
    if kind == "opus":  # the same packets, on other pages
        np.testing.assert_array_equal(decode_av(cut, "opus")[0], decode_av(whole, "opus")[0])
    else:
        assert cut == whole


@pytest.mark.parametrize("kind", FORMATS)
def test_single_samples_are_chunks_too(kind):
    pcm_S = sweep(2500, 24000)
    cut = encode(kind, 24000, pcm_S, [1] * 2500)
    whole = encode(kind, 24000, pcm_S, [])
    if kind == "pcm":
        assert cut == whole
        return
    np.testing.assert_array_equal(decode_av(cut, kind)[0], decode_av(whole, kind)[0])


LATENCY = {
    "wav": lambda rate: 0,
    "flac": lambda rate: rate // 50 - 1,
    "opus": lambda rate: rate // 50 - 1 + 312 * rate // 48000,
    "mp3": lambda rate: MP3_DELAY + 2 * FRAME["mp3"][rate] - 1,
    "aac": lambda rate: AAC_DELAY + 2 * FRAME["aac"][rate] - 1,
}


@pytest.mark.parametrize("sample_rate", [24000, 48000])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_prefix_decodes_as_far_as_the_latency_says(kind, sample_rate):
    step = 97
    pcm_S = sweep(sample_rate // 4, sample_rate)
    whole_S, rate = decode_av(encode(kind, sample_rate, pcm_S, []), kind)
    # FFmpeg opens no file without sound; in an MP3 the first frames hold nothing but delay.
    min_bytes = {"mp3": 3 * 288, "opus": 130}.get(kind, 1)
    encoder, data, num_decoded, worst = open_encoder(kind, sample_rate), b"", 0, 0
    for end in range(step, len(pcm_S), step):
        worst = max(worst, end - step - num_decoded)
        new = encoder.encode(pcm_S[end - step : end])
        data += new
        if not new or len(data) < min_bytes:
            continue
        got_S, _ = decode_av(data, kind)
        np.testing.assert_array_equal(got_S, whole_S[: len(got_S)])
        extra = AAC_DELAY if kind == "aac" else 0
        num_decoded = len(got_S) * sample_rate // rate - extra
    latency = LATENCY[kind](sample_rate)
    assert latency - 2 * step <= worst <= latency


@pytest.mark.parametrize("kind", ["wav", "flac", "opus"])
def test_the_header_comes_before_any_sound(kind):
    encoder = open_encoder(kind, 24000)
    assert encoder.encode(np.zeros(0, np.float32))[:4] in (b"RIFF", b"fLaC", b"OggS")
    assert encoder.encode(np.zeros(0, np.float32)) == b""


@pytest.mark.parametrize("kind", FORMATS)
def test_a_stream_without_sound_is_no_more_than_its_header(kind):
    encoder = open_encoder(kind, 24000)
    assert len(encoder.finish()) == {"wav": 44, "flac": 42, "opus": 126}.get(kind, 0)


@pytest.mark.parametrize("num_samples", [1, 50, 500])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_the_shortest_clips_decode(kind, num_samples):
    decoded_S, rate = decode_av(encode_clip(kind, 24000, sweep(num_samples, 24000)), kind)
    wanted = 2048 if kind == "aac" else num_samples * rate // 24000
    assert wanted <= len(decoded_S) <= wanted + (529 if kind == "mp3" else 0)


def test_a_stream_is_one_stream():
    pcm_S = sweep(30000, 24000)
    data = {name: encode(name, 24000, pcm_S, [500] * 50) for name in CONTAINERS}
    assert data["wav"].count(b"RIFF") == data["flac"].count(b"fLaC") == 1
    assert data["mp3"].count(b"Info") == 1
    pages = data["opus"].split(b"OggS")[1:]
    flags = [page[1] for page in pages]
    assert flags == [2, *[0] * (len(pages) - 2), 4]
    assert [int.from_bytes(page[14:18], "little") for page in pages] == list(range(len(pages)))


def test_long_chunks_share_pages():
    data = encode("opus", 24000, babble(24000 * 10, 24000), [])
    assert data.count(b"OggS") < 20
    assert len(decode_av(data, "opus")[0]) == 480_000


def test_wav_header_has_the_length_only_where_known():
    pcm_S = sweep(1000, 24000)
    stream = encode("wav", 24000, pcm_S, [10])
    assert stream[4:8] == stream[40:44] == b"\xff" * 4
    with wave.open(io.BytesIO(encode_clip("wav", 24000, pcm_S))) as reader:
        assert (reader.getnframes(), reader.getframerate(), reader.getnchannels()) == (
            1000,
            24000,
            1,
        )


@pytest.mark.parametrize("sample_rate", [22050, 24000])
@pytest.mark.parametrize("kind", FORMATS)
def test_finished_stream_gets_its_length_in_the_header(kind, sample_rate):
    pcm_S = sweep(5000, sample_rate)
    encoder = open_encoder(kind, sample_rate)
    stream = encoder.encode(pcm_S) + encoder.finish()
    head = encoder.final_head()
    assert head + stream[len(head) :] == encode_clip(kind, sample_rate, pcm_S)
    assert bool(head) == (kind in ("wav", "flac", "mp3"))


@pytest.mark.parametrize("kind", FORMATS)
def test_stream_header_has_the_sample_rate(kind):
    encoder = open_encoder(kind, 23000)
    data = encoder.encode(sweep(9000, 23000)) + encoder.finish()
    if kind != "pcm":
        assert decode_av(data, kind)[1] == (48000 if kind == "opus" else encoder.sample_rate)
    assert encoder.sample_rate == (23000 if kind in ("wav", "flac") else 24000)


def test_bare_samples_come_at_the_rate_that_clients_expect():
    pcm_S = sweep(22050, 22050)
    decoded_S = np.frombuffer(encode("pcm", 22050, pcm_S, [100] * 9), "<i2") / 32767
    assert len(decoded_S) == 24000
    assert correlation(decoded_S[50:-50], sweep(24000, 24000)[50:-50]) > 0.9999


@pytest.mark.parametrize("rate", [8000, 9999, 22050, 24000, 44100, 48000])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_rate_that_is_asked_for_is_kept_or_refused(kind, rate):
    fits = kind in ("wav", "flac", "pcm") or rate == 8000 or rate > 23000 or rate == 22050
    if not fits or (kind == "opus" and rate in (22050, 44100)):
        with pytest.raises(InvalidRequest, match="wav, flac and pcm support any"):
            open_encoder(kind, 24000, target_rate=rate)
        return
    encoder = open_encoder(kind, 24000, target_rate=rate)
    data = encoder.encode(sweep(24000, 24000)) + encoder.finish()
    assert encoder.sample_rate == rate
    if kind == "pcm":
        pcm_S = np.frombuffer(data, "<i2") / 32767
        assert correlation(pcm_S[50:-50], sweep(rate, rate)[50:-50]) > 0.98


@pytest.mark.parametrize("kind", FORMATS)
def test_bad_samples_are_tamed(kind):
    pcm_S = sweep(6000, 24000)
    wild_S = pcm_S.copy()
    wild_S[100:110], wild_S[200:210], wild_S[300:310] = np.nan, np.inf, -np.inf
    tamed_S = np.where(np.isfinite(wild_S), wild_S, 0)
    assert encode(kind, 24000, wild_S, [105]) == encode(kind, 24000, tamed_S, [105])
    loud = encode(kind, 24000, 9 * pcm_S, [])
    assert loud == encode(kind, 24000, np.clip(9 * pcm_S, -1, 1), [])


def test_full_scale_is_the_16_bit_range():
    pcm_S = np.array([-1, -2, 0, 1, 2], np.float32)
    decoded = np.frombuffer(encode("pcm", 24000, pcm_S, []), "<i2")
    assert decoded.tolist() == [-32767, -32767, 0, 32767, 32767]


@pytest.mark.parametrize("kind", FORMATS)
def test_memory_does_not_grow_with_the_stream(kind):
    encoder, chunk_S = open_encoder(kind, 22050), babble(2205, 22050)
    encoder.encode(chunk_S)
    tracemalloc.start()
    for _ in range(200):
        encoder.encode(chunk_S)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 400_000  # 20 s of float32 are 1.8 MB


def test_an_unknown_format_is_named():
    with pytest.raises(InvalidRequest, match="mp3, opus, aac, flac, wav, pcm"):
        open_encoder("mp4", 24000)


def test_the_bit_rate_is_a_choice():
    pcm_S = babble(24000, 24000)
    sizes = []
    for bit_rate in (32_000, 64_000, 128_000):
        encoder = open_encoder("mp3", 24000, bit_rate=bit_rate)
        sizes.append(len(encoder.encode(pcm_S)) + len(encoder.finish()))
        assert sizes[-1] == pytest.approx(bit_rate / 8, rel=0.15)


@settings(max_examples=30, deadline=None)
@given(
    rates=st.tuples(
        st.sampled_from([8000, 16000, 22050, 24000, 44100, 48000]),
        st.sampled_from([8000, 16000, 24000, 48000]),
    ),
    num_samples=st.integers(0, 5000),
    sizes=st.lists(st.integers(0, 700), max_size=10),
)
def test_a_resampler_keeps_length_and_does_not_see_cuts(rates, num_samples, sizes):
    pcm_S, start = sweep(num_samples, rates[0]), 0
    cut, whole = Resampler(*rates), Resampler(*rates)
    parts = []
    for size in [*sizes, num_samples]:
        parts.append(cut.push(pcm_S[start : start + size]))
        start += size
    parts.append(cut.flush())
    whole_S = np.concatenate([whole.push(pcm_S), whole.flush()])
    np.testing.assert_array_equal(np.concatenate(parts), whole_S)
    assert len(whole_S) == cut.target_length(num_samples)
    assert abs(len(whole_S) - num_samples * rates[1] / rates[0]) <= 0.5
