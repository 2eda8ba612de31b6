"""Streaming audio encoders: one encoder object per response.

Owns the formats and their assembly. Knows nothing of models, requests or sockets. An encoder is
never restarted, so chunk boundaries are inaudible, and the bytes returned so far always decode.

Latency is the number of input samples that a decoder cannot yet return: those waiting for a whole
frame, and the codec's look-ahead. A source rate that the format does not support is raised to the
next one, which adds at most 50 samples; a requested rate is kept or refused. A stream without sound
is only a header. libsndfile cannot read a FLAC stream of unknown length; other decoders can.

    format  rates                  latency, samples           what the container declares
    pcm     all; by default 24     0                          nothing
            kHz, which OpenAI's
            clients take for
            granted
    wav     all                    0                          length, where known
    flac    all                    a frame less one, 20 ms    length, where known
    opus    8, 12, 16, 24, 48 kHz  the delay and a frame      delay; exact end
                                   less one, 26.5 ms
    mp3     nine, 8 to 48 kHz      the delay, 1105, and two   delay; where the length is known,
                                   frames less one: 2256 at   also the exact end
                                   24 kHz, 3408 at 48 kHz
    aac     twelve, 8 to 96 kHz    the delay, 1024, and two   nothing, as ADTS cannot: 1024 samples
                                   frames less one: 3071      of silence in front, the last frame
                                                              padded
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from triptych.core.errors import InvalidRequest
from triptych.core.media.audio import framing
from triptych.core.media.audio.resampling import Pcm, Resampler, audio_frame

_PACKETS_PER_PAGE = 32  # of at most 6 segments each, where 255 fit
_MPEG_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)


class AudioEncoder:
    """One response's audio in one container. Not thread-safe; holds less than a codec frame."""

    def __init__(self, container: _Container, kind: _Kind, resampler: Resampler) -> None:
        self.content_type = kind.content_type
        self.sample_rate = resampler.target_rate
        """The rate of the decoded audio (Hz), except that Opus always decodes at 48 kHz."""
        self._container = container
        self._resampler = resampler
        self._head = container.head()
        self._num_samples = 0
        self._is_finished = False

    def encode(self, pcm_S: Pcm) -> bytes:
        """Encode the next mono samples, any number; return the bytes that are ready, maybe none.

        Samples beyond full scale are clipped; NaN and infinity become silence.
        """
        assert not self._is_finished
        assert pcm_S.ndim == 1
        finite_S = np.nan_to_num(pcm_S.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
        return self._take_head() + self._push(self._resampler.push(np.clip(finite_S, -1.0, 1.0)))

    def finish(self) -> bytes:
        """End the stream and return its last bytes. Nothing may follow."""
        assert not self._is_finished
        self._is_finished = True
        tail = self._push(self._resampler.flush())
        return self._take_head() + tail + self._container.finish()

    def final_head(self) -> bytes:
        """The final header of a finished stream, with its length, to write over the first one.

        Empty if the format states no length.
        """
        assert self._is_finished
        return self._container.final_head(self._num_samples)

    def _push(self, pcm_S: Pcm) -> bytes:
        self._num_samples += len(pcm_S)
        return self._container.push(np.clip(pcm_S, -1.0, 1.0))  # the resampler may overshoot

    def _take_head(self) -> bytes:
        head, self._head = self._head, b""
        return head


def open_encoder(
    audio_format: str,
    sample_rate: int,
    *,
    target_rate: int | None = None,
    num_samples: int | None = None,
    bit_rate: int | None = None,
) -> AudioEncoder:
    """Start one response in `audio_format`, one of `FORMATS`, fed with mono at `sample_rate` (Hz).

    `target_rate` is the file's; by default the nearest of the format. With `num_samples` (of the
    source) the header declares the length, and exactly this number must be encoded. `bit_rate`
    (bits per second) is for mp3, opus and aac. Raises InvalidRequest for an unknown format, and for
    a target rate that the format does not support.
    """
    if (kind := _KINDS.get(audio_format)) is None:
        msg = f"response_format must be one of {', '.join(FORMATS)}"
        raise InvalidRequest(msg, param="response_format")
    if target_rate is not None and kind.rates and target_rate not in kind.rates:
        rates = ", ".join(map(str, kind.rates))
        msg = f"{audio_format} supports sample rates of {rates} Hz; wav, flac and pcm support any."
        raise InvalidRequest(msg, param="sample_rate")
    rate = target_rate or kind.usual_rate(sample_rate)
    resampler = Resampler(sample_rate, rate)
    length = None if num_samples is None else resampler.target_length(num_samples)
    container = kind.open(_Stream(rate, length, bit_rate))
    return AudioEncoder(container, kind, resampler)


def encode_clip(audio_format: str, sample_rate: int, pcm_S: Pcm) -> bytes:
    """Encode a whole clip as one file, which declares its length if the format can."""
    encoder = open_encoder(audio_format, sample_rate, num_samples=len(pcm_S))
    return encoder.encode(pcm_S) + encoder.finish()


@dataclass(frozen=True, slots=True)
class _Stream:
    sample_rate: int
    num_samples: int | None
    bit_rate: int | None


# -- encoders ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """An encoder of libavcodec and its settings."""

    name: str
    sample_format: str
    bit_rate: int | None = None
    frame_s: Fraction | None = None
    """Seconds of a frame, if the codec allows several sizes."""
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def _to_int16(pcm_S: Pcm) -> npt.NDArray[np.int16]:
    """Round full scale to the 16-bit range, symmetrically. The samples are within full scale."""
    return np.rint(pcm_S * 32767).astype(np.int16)


class PacketEncoder:
    """Encodes one mono stream at `sample_rate` (Hz) into packets."""

    def __init__(self, spec: CodecSpec, sample_rate: int, bit_rate: int | None) -> None:
        import av

        context = av.CodecContext.create(spec.name, "w")
        assert isinstance(context, av.AudioCodecContext)
        context.sample_rate, context.time_base = sample_rate, Fraction(1, sample_rate)
        context.format, context.layout = av.AudioFormat(spec.sample_format), av.AudioLayout("mono")
        if spec.bit_rate:
            context.bit_rate = bit_rate or spec.bit_rate
        size = {"frame_size": str(int(sample_rate * spec.frame_s))} if spec.frame_s else {}
        context.options = {**spec.options, **size}
        context.open()
        self.sample_rate = sample_rate
        self.frame_size = context.frame_size
        self.config = context.extradata or b""
        """Configuration that a decoder needs before the first packet."""
        self.delay = 0
        """Samples before the sound in the first packet, known once there is one."""
        self.num_samples = 0
        self._context = context
        self._sample_format = spec.sample_format
        self._pending: Pcm = np.zeros(0, np.float32)
        self._num_packets = self._num_in = 0

    def push(self, pcm_S: Pcm) -> list[bytes]:
        """Encode samples within full scale; return the packets that are ready."""
        self.num_samples += len(pcm_S)
        pending = np.concatenate([self._pending, pcm_S])
        num_whole = len(pending) - len(pending) % self.frame_size
        self._pending = pending[num_whole:].copy()
        frames = pending[:num_whole].reshape(-1, self.frame_size)
        return [packet for frame_S in frames for packet in self._encode(frame_S)]

    def finish(self, *, pads: bool) -> list[bytes]:
        """Return the last packets; with `pads`, silence fills the last frame."""
        num_before = self._num_packets
        tail = self._pending
        if pads:
            tail = np.pad(tail, (0, -len(tail) % self.frame_size))
        packets = [*(self._encode(tail) if len(tail) else ()), *self._encode(None)]
        # Drained codecs append silence, which is not sent.
        num_needed = -(-(self.num_samples + self.delay) // self.frame_size)
        assert self._num_packets >= num_needed
        return packets[: num_needed - num_before]

    def _encode(self, frame_S: Pcm | None) -> list[bytes]:
        frame = None
        if frame_S is not None:
            samples = _to_int16(frame_S) if self._sample_format == "s16" else frame_S
            frame = audio_frame(samples, self._sample_format, self.sample_rate, self._num_in)
            self._num_in += len(frame_S)
        packets = [packet for packet in self._context.encode(frame) if packet.size]
        if packets and not self._num_packets:
            self.delay = -(packets[0].pts or 0)
        self._num_packets += len(packets)
        return [bytes(packet) for packet in packets]


# -- containers ----------------------------------------------------------------------------------


class _Container(ABC):
    """A container format. By default it has no header and states no length."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def head(self) -> bytes:
        return b""

    def final_head(self, num_samples: int) -> bytes:
        return b""

    @abstractmethod
    def push(self, pcm_S: Pcm) -> bytes: ...

    @abstractmethod
    def finish(self) -> bytes: ...


class _Pcm(_Container):
    def push(self, pcm_S: Pcm) -> bytes:
        return _to_int16(pcm_S).astype("<i2").tobytes()

    def finish(self) -> bytes:
        return b""


class _Wav(_Pcm):
    def head(self) -> bytes:
        return framing.wav_header(self._stream.sample_rate, self._stream.num_samples)

    def final_head(self, num_samples: int) -> bytes:
        return framing.wav_header(self._stream.sample_rate, num_samples)


class _Coded(_Container):
    """A container of packets; silence fills the last frame."""

    SPEC: ClassVar[CodecSpec]
    PADS: ClassVar[bool] = True

    def __init__(self, stream: _Stream) -> None:
        super().__init__(stream)
        self._codec = PacketEncoder(self.SPEC, stream.sample_rate, stream.bit_rate)

    def push(self, pcm_S: Pcm) -> bytes:
        return self._framed(self._codec.push(pcm_S))

    def finish(self) -> bytes:
        return self._framed(self._codec.finish(pads=self.PADS))

    def _framed(self, packets: Sequence[bytes]) -> bytes:
        return b"".join(packets)


class _Flac(_Coded):
    # Any block size is allowed; the encoder's own choice at 24 kHz would wait for 96 ms.
    SPEC = CodecSpec(name="flac", sample_format="s16", frame_s=Fraction(1, 50))
    PADS = False

    def head(self) -> bytes:
        return framing.flac_header(self._codec.config, self._stream.num_samples)

    def final_head(self, num_samples: int) -> bytes:
        return framing.flac_header(self._codec.config, num_samples)


class _Adts(_Coded):
    SPEC = CodecSpec(name="aac", sample_format="fltp", bit_rate=96_000)

    def _framed(self, packets: Sequence[bytes]) -> bytes:
        return b"".join(framing.adts_frame(self._codec.config, packet) for packet in packets)


class _Mp3(_Coded):  # the Info frame copies its header from the first packet
    # Without the bit reservoir frames are independent, and ready one frame earlier.
    SPEC = CodecSpec(
        name="libmp3lame", sample_format="fltp", bit_rate=96_000, options={"reservoir": "0"}
    )
    _first_packet = b""

    def _framed(self, packets: Sequence[bytes]) -> bytes:
        info = b""
        if packets and not self._first_packet:
            self._first_packet = packets[0]
            info = self._info(self._stream.num_samples)
        return info + b"".join(packets)

    def final_head(self, num_samples: int) -> bytes:
        return self._info(num_samples) if self._first_packet else b""

    def _info(self, num_samples: int | None) -> bytes:
        return framing.mp3_info_frame(self._first_packet, self._codec.frame_size, num_samples)


class _OggOpus(_Coded):  # its last page states the end of the sound
    SPEC = CodecSpec(name="libopus", sample_format="flt", bit_rate=64_000)

    def __init__(self, stream: _Stream) -> None:
        super().__init__(stream)
        self._pages = framing.OggOpusPages()
        self._scale = framing.OPUS_RATE // stream.sample_rate
        self._granule = 0

    def head(self) -> bytes:
        return self._pages.header(self._codec.config)

    def finish(self) -> bytes:
        # The codec's delay leaves a packet for the last page, whose position trims the sound.
        packets = self._codec.finish(pads=True)
        split = (len(packets) - 1) // _PACKETS_PER_PAGE * _PACKETS_PER_PAGE
        end = self._scale * (self._codec.num_samples + self._codec.delay)
        pages = self._framed(packets[:split])
        return pages + self._pages.page(packets[split:], end, is_last=True)

    def _framed(self, packets: Sequence[bytes]) -> bytes:
        pages = b""
        for start in range(0, len(packets), _PACKETS_PER_PAGE):
            page = packets[start : start + _PACKETS_PER_PAGE]
            self._granule += len(page) * self._codec.frame_size * self._scale
            pages += self._pages.page(page, self._granule)
        return pages


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    content_type: str
    open: Callable[[_Stream], _Container]
    rates: tuple[int, ...] = ()  # () takes all
    fixed_rate: int | None = None  # if none is requested

    def usual_rate(self, source_rate: int) -> int:
        """The rate of a file if none is requested."""
        if self.fixed_rate or not self.rates:
            return self.fixed_rate or source_rate
        return min((rate for rate in self.rates if rate >= source_rate), default=max(self.rates))


_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        "mp3": _Kind(content_type="audio/mpeg", open=_Mp3, rates=_MPEG_RATES),
        "opus": _Kind(
            content_type="audio/ogg; codecs=opus",
            open=_OggOpus,
            rates=(8000, 12000, 16000, 24000, 48000),
        ),
        "aac": _Kind(
            content_type="audio/aac", open=_Adts, rates=(*_MPEG_RATES, 64000, 88200, 96000)
        ),
        "flac": _Kind(content_type="audio/flac", open=_Flac),
        "wav": _Kind(content_type="audio/wav", open=_Wav),
        "pcm": _Kind(content_type="audio/pcm", open=_Pcm, fixed_rate=24_000),
    }
)
FORMATS = tuple(_KINDS)
"""The formats of `response_format`; mp3 is OpenAI's default."""
