"""Reads uploaded clips under limits that hold whatever a file claims.

Owns the accepted formats, and when reading stops. Knows nothing of HTTP or models. Headers are
never trusted: bytes decide the format, decoded frames decide rate, channels and length, and memory
is bounded by the requested output and one decoded frame. A file that is shorter than its header
states was cut short, and is refused. Only the demuxer of the detected format is opened, with only
its decoders, so no playlist or reference to another file is ever followed. PyAV is imported with
the first clip.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from triptych.core.errors import InvalidRequest, PayloadTooLarge, UnsupportedMedia
from triptych.core.media.audio.resampling import Pcm, Resampler

if TYPE_CHECKING:
    import av
    from av.audio.codeccontext import AudioCodecContext
    from av.container import InputContainer

_PCM = "pcm_u8,pcm_s16le,pcm_s24le,pcm_s32le,pcm_f32le,pcm_f64le,pcm_alaw,pcm_mulaw"
_TELEPHONE = "adpcm_ima_wav,adpcm_ms,gsm_ms,adpcm_g722"
_DECODERS: Mapping[str, str] = MappingProxyType(
    {
        "wav": f"{_PCM},{_TELEPHONE}",
        "flac": "flac",
        "ogg": "opus,libopus,vorbis,libvorbis,flac",
        "mp3": "mp3float,mp3",
        "aac": "aac",
        "mov": "aac,mp3float,mp3,opus,libopus,flac",
        "matroska": "opus,libopus,vorbis,libvorbis,aac,mp3float,mp3,flac",
    }
)
"""Decoders allowed in each format. None reads a frame size of more than 16 bits from a
header, which excludes ALAC."""

_SAMPLE_TYPES: Mapping[str, str] = MappingProxyType(
    {"u8": "u1", "s16": "i2", "s32": "i4", "flt": "f4", "dbl": "f8"}
)
_SIZE_IN_DS64 = 0xFFFF_FFFF
_MAX_IDLE_PACKETS = 1024
"""Packets without sound: allows 20 s of leading AAC hidden by an edit list, but no flood."""
_MAX_BROKEN_PACKETS = 16
_MAX_PEAK = 100.0
"""The largest float sample accepted at full scale 1; larger ones have another scale."""
_LEAST_CANCELLATION = 1e-4
"""Share of the channels' energy below which their mean shows opposite phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipLimits:
    """Limits on a clip. The rates (Hz) and channels are those of the decoded frames."""

    max_bytes: int
    max_seconds: float
    max_channels: int = 8
    min_sample_rate: int = 8_000
    max_sample_rate: int = 192_000


VOICE_LIMITS = ClipLimits(max_bytes=10 * 2**20, max_seconds=60)
"""Limits of a sample for voice cloning."""
TRANSCRIPTION_LIMITS = ClipLimits(max_bytes=25 * 2**20, max_seconds=3600)
"""Limits of a file to transcribe; at 16 kHz it takes up to 230 MB when read whole."""


def read_clip(data: bytes, *, sample_rate: int, limits: ClipLimits) -> Pcm:
    """Decode all of `data` to mono at `sample_rate` (Hz). Raises as `stream_clip` does."""
    return np.concatenate(list(stream_clip(data, sample_rate=sample_rate, limits=limits)))


def stream_clip(data: bytes, *, sample_rate: int, limits: ClipLimits) -> Iterator[Pcm]:
    """Decode `data` in pieces to mono at `sample_rate` (Hz); channels are averaged.

    Raises UnsupportedMedia for an unsupported format, PayloadTooLarge at the first piece beyond a
    limit, InvalidRequest for a file that is empty, damaged or out of range.
    """
    if len(data) > limits.max_bytes:
        msg = f"The audio file is larger than {limits.max_bytes / 2**20:g} MiB."
        raise PayloadTooLarge(msg, param="file")
    budget = round(limits.max_seconds * sample_rate)
    num_samples = 0
    for pcm_S in _resampled(_frames(data), sample_rate, limits):
        num_samples += len(pcm_S)
        if num_samples > budget:
            msg = f"The audio is longer than {limits.max_seconds:g} s."
            raise PayloadTooLarge(msg, param="file")
        yield pcm_S
    if not num_samples:
        raise InvalidRequest("The audio file holds no sound.", param="file")


def check_voice(pcm_S: Pcm, sample_rate: int, *, min_seconds: float = 1.0) -> None:
    """Raise InvalidRequest for a clip unsuitable for voice cloning.

    It must last `min_seconds`, and half as long be louder than silence (-50 dBFS, in blocks of
    20 ms, without their offset).
    """
    num_blocks, block_size = max(len(pcm_S) * 50 // sample_rate, 1), sample_rate // 50
    if len(pcm_S) < min_seconds * sample_rate:
        msg = f"The voice sample must last at least {min_seconds:g} s."
        raise InvalidRequest(msg, param="file")
    blocks = pcm_S[: num_blocks * block_size].reshape(-1, block_size)
    loudness = (blocks - blocks.mean(1, keepdims=True)).std(1)
    if np.count_nonzero(loudness > 10 ** (-50 / 20)) < 50 * min_seconds / 2:
        raise InvalidRequest("The voice sample is silent.", param="file")


def sniff(data: bytes) -> str:
    """The demuxer for the first bytes of a file. Raises UnsupportedMedia for other bytes."""
    head = bytes(data[:12])
    if head[:4] in (b"RIFF", b"RF64") and head[8:] == b"WAVE":
        return "wav"
    if head[4:8] == b"ftyp":
        return "mov"
    magics = {b"fLaC": "flac", b"OggS": "ogg", b"\x1aE\xdf\xa3": "matroska", b"ID3": "mp3"}
    for magic, name in magics.items():
        if head.startswith(magic):
            return name
    if len(head) > 1 and head[0] == 0xFF:
        if head[1] & 0xF6 == 0xF0:
            return "aac"
        if head[1] & 0xE6 == 0xE2:
            return "mp3"
    msg = "The file is not in a supported audio format: send wav, flac, ogg, mp3, aac, m4a or webm."
    raise UnsupportedMedia(msg, param="file")


def _frames(data: bytes) -> Iterator[av.AudioFrame]:
    """Decode the first audio stream."""
    if not data:
        raise InvalidRequest("The audio file is empty.", param="file")
    kind = sniff(data)
    import av.error

    try:
        with _open(data, kind) as container:
            if not (streams := container.streams.audio):
                raise InvalidRequest("The file holds no audio stream.", param="file")
            codec = streams[0].codec_context  # None for an unknown codec, despite its type
            if codec is None or codec.name not in _DECODERS[kind].split(","):
                raise _unsupported_codec(kind, codec)
            if kind == "wav" and _is_cut_wav(data):
                raise _cut_short()
            num_samples = 0
            for frame in _decoded(container.demux(streams[0])):
                num_samples += frame.samples
                yield frame
            if kind == "flac" and num_samples < _num_flac_samples(data):
                raise _cut_short()
    except av.error.FFmpegError as error:
        raise _damaged() from error


def _unsupported_codec(kind: str, codec: AudioCodecContext | None) -> UnsupportedMedia:
    name = f"The audio codec {codec.name}" if codec is not None else "The file's audio codec"
    known = ", ".join(_DECODERS[kind].split(","))
    return UnsupportedMedia(
        f"{name} is not supported; supported in {kind} files: {known}. Or send flac or mp3.",
        param="file",
    )


def _is_cut_wav(data: bytes) -> bool:
    """Whether the chunk of samples extends beyond the file's end.

    Sizes larger than any upload are ignored: streaming writers put 0, a largest number or another
    placeholder there. RF64 stores the size in a separate chunk.
    """
    start, size_64 = 12, 0
    while start + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, start)
        start += 8
        if name == b"ds64" and start + 16 <= len(data):
            (size_64,) = struct.unpack_from("<Q", data, start + 8)
        if name == b"data":
            promised = size_64 if data[:4] == b"RF64" and size == _SIZE_IN_DS64 else size
            return promised <= TRANSCRIPTION_LIMITS.max_bytes and start + promised > len(data)
        start += size + size % 2
    return False


def _num_flac_samples(data: bytes) -> int:
    """The number of samples that a FLAC file's first block states; 0 if unknown."""
    return int(struct.unpack_from(">Q", data, 18)[0]) & (2**36 - 1) if len(data) >= 26 else 0


def _open(data: bytes, kind: str) -> InputContainer:
    import av

    options = {"codec_whitelist": _DECODERS[kind], "max_streams": "16"}
    # Tags in encodings other than UTF-8 are common and not needed.
    return av.open(io.BytesIO(data), "r", format=kind, options=options, metadata_errors="ignore")


def _decoded(packets: Iterator[av.Packet[av.AudioStream]]) -> Iterator[av.AudioFrame]:
    import av.error

    num_idle = num_broken = 0
    for packet in packets:
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            frames, num_broken = [], num_broken + 1
        num_idle += not frames
        if num_idle > _MAX_IDLE_PACKETS or num_broken > _MAX_BROKEN_PACKETS:
            raise _damaged()
        yield from frames


def _resampled(
    frames: Iterator[av.AudioFrame], sample_rate: int, limits: ClipLimits
) -> Iterator[Pcm]:
    resampler, first_rate = None, 0
    for frame in frames:
        if resampler is None:
            first_rate = frame.sample_rate
            if not limits.min_sample_rate <= first_rate <= limits.max_sample_rate:
                low, high = limits.min_sample_rate, limits.max_sample_rate
                msg = (
                    f"The audio has {first_rate} samples per second; {low} to {high} are supported."
                )
                raise InvalidRequest(msg, param="file")
            resampler = Resampler(first_rate, sample_rate)
        if frame.sample_rate != first_rate:
            raise InvalidRequest("The audio changes its sample rate midway.", param="file")
        if frame.layout.nb_channels > limits.max_channels:
            msg = f"The audio has more than {limits.max_channels} channels."
            raise InvalidRequest(msg, param="file")
        yield resampler.push(_mono(frame))
    if resampler is not None:
        yield resampler.flush()


def _samples(frame: av.AudioFrame) -> npt.NDArray[np.generic]:
    """A frame's samples, `[channels, samples]`.

    PyAV's `planes` reads until a null pointer, which eight channels do not have.
    """
    from av.audio.plane import AudioPlane

    num_channels, dtype = frame.layout.nb_channels, _SAMPLE_TYPES[frame.format.packed.name]
    num_planes = num_channels if frame.format.is_planar else 1
    size = frame.samples * num_channels // num_planes
    planes = [AudioPlane(frame, index) for index in range(num_planes)]
    stored = np.stack([np.frombuffer(bytes(plane), dtype, size) for plane in planes])
    return stored if frame.format.is_planar else stored.reshape(-1, num_channels).T


def _mono(frame: av.AudioFrame) -> Pcm:
    """The mean of the channels at full scale -1 to 1; of two in opposite phase, the first."""
    samples = _samples(frame)
    channels_CS = samples.astype(np.float32)
    if samples.dtype.kind == "f":
        _check_peak(float(np.abs(samples).max(initial=0.0)))
    else:
        channels_CS /= np.float32(2.0 ** (8 * samples.dtype.itemsize - 1))
        channels_CS -= np.float32(samples.dtype.kind == "u")
    mono_S: Pcm = channels_CS.mean(0)
    if len(channels_CS) == 2:
        energy = float(np.square(channels_CS).mean())
        if float(np.square(mono_S).mean()) < _LEAST_CANCELLATION * energy:
            mono_S = channels_CS[0]
    return mono_S.clip(-1.0, 1.0)


def _check_peak(peak: float) -> None:
    if not math.isfinite(peak):
        raise InvalidRequest("The audio holds values that are not finite numbers.", param="file")
    if peak > _MAX_PEAK:
        raise InvalidRequest(
            f"The audio has float samples up to {peak:.3g}, but full scale is 1: scale them.",
            param="file",
        )


def _cut_short() -> InvalidRequest:
    msg = "The audio file is cut short: its header states more samples than it holds."
    return InvalidRequest(msg, param="file")


def _damaged() -> InvalidRequest:
    return InvalidRequest("The audio file is damaged or not of its apparent format.", param="file")
