"""Audio files written while their sound is still being made: one encoder object per response.

Owns the formats and how each is put together. Knows nothing of models, requests or sockets. The
encoder is started once and never restarted, so a chunk's edge leaves no trace in the sound, and
the bytes returned so far always decode.

Latency is how many samples may have gone in that a decoder cannot yet give back: those that wait
for a whole frame, and those that the codec looks ahead. A rate that the format does not take is
raised to the next one that it does, which adds at most 50 samples. A stream without sound is its
header alone. Of a FLAC stream of unknown length, libsndfile alone reads nothing.

    format  rates                  latency, samples           what the container declares
    pcm     24 kHz only, which     0                          nothing
            OpenAI's clients take
            for granted
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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Protocol

import numpy as np

from triptych.core.errors import InvalidRequest
from triptych.core.media.audio import framing
from triptych.core.media.audio.codec import CodecSpec, PacketEncoder, to_int16
from triptych.core.media.audio.resampling import Pcm, Resampler

_PACKETS_PER_PAGE = 32  # of at most 6 segments each, where 255 fit
_MPEG_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)


class AudioEncoder:
    """One response's audio in one container. Not thread-safe; holds less than a codec frame."""

    def __init__(self, container: _Container, kind: _Kind, resampler: Resampler) -> None:
        self.content_type = kind.content_type
        self.sample_rate = resampler.target_rate
        """Of what a decoder gives back (Hz); Opus always gives 48 kHz."""
        self._container = container
        self._resampler = resampler
        self._head = container.head()
        self._num_samples = 0
        self._is_finished = False

    def encode(self, pcm_S: Pcm) -> bytes:
        """Take the next samples, mono, any number; return the bytes that are ready, maybe none.

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
        """What to write over the beginning of a finished stream, so that it tells its length.

        Empty where the format tells none.
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
    num_samples: int | None = None,
    bit_rate: int | None = None,
) -> AudioEncoder:
    """Start one response in `audio_format`, one of `FORMATS`, fed with mono at `sample_rate` (Hz).

    Where `num_samples` is given the header declares it, and exactly so many must be encoded.
    `bit_rate` (bits per second) is for mp3, opus and aac. Raises InvalidRequest for an unknown
    format.
    """
    if (kind := _KINDS.get(audio_format)) is None:
        msg = f"response_format must be one of {', '.join(FORMATS)}"
        raise InvalidRequest(msg, param="response_format")
    rate = _nearest_rate(sample_rate, kind.rates)
    resampler = Resampler(sample_rate, rate)
    length = None if num_samples is None else resampler.target_length(num_samples)
    container = kind.open(_Stream(rate, length, bit_rate))
    return AudioEncoder(container, kind, resampler)


def encode_clip(audio_format: str, sample_rate: int, pcm_S: Pcm) -> bytes:
    """Write a whole clip as one file, which declares its length where the format can."""
    encoder = open_encoder(audio_format, sample_rate, num_samples=len(pcm_S))
    return encoder.encode(pcm_S) + encoder.finish()


def _nearest_rate(sample_rate: int, rates: Sequence[int]) -> int:
    if not rates:
        return sample_rate
    return min((rate for rate in rates if rate >= sample_rate), default=max(rates))


@dataclass(frozen=True, slots=True)
class _Stream:
    sample_rate: int
    num_samples: int | None
    bit_rate: int | None

    def codec(self, spec: CodecSpec) -> PacketEncoder:
        return PacketEncoder(spec, self.sample_rate, self.bit_rate)


class _Container(Protocol):
    def head(self) -> bytes: ...
    def push(self, pcm_S: Pcm) -> bytes: ...
    def finish(self) -> bytes: ...
    def final_head(self, num_samples: int) -> bytes: ...


class _Headless:
    """A container that says nothing in front, and nothing of its length."""

    def head(self) -> bytes:
        return b""

    def final_head(self, num_samples: int) -> bytes:
        return b""


class _Pcm(_Headless):
    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def push(self, pcm_S: Pcm) -> bytes:
        return to_int16(pcm_S).astype("<i2").tobytes()

    def finish(self) -> bytes:
        return b""


class _Wav(_Pcm):
    def head(self) -> bytes:
        return framing.wav_header(self._stream.sample_rate, self._stream.num_samples)

    def final_head(self, num_samples: int) -> bytes:
        return framing.wav_header(self._stream.sample_rate, num_samples)


class _Flac:
    # Any block size is allowed; the encoder's own choice at 24 kHz would wait for 96 ms.
    SPEC = CodecSpec(name="flac", sample_format="s16", frame_s=Fraction(1, 50))

    def __init__(self, stream: _Stream) -> None:
        self._stream, self._codec = stream, stream.codec(self.SPEC)

    def head(self) -> bytes:
        return framing.flac_header(self._codec.config, self._stream.num_samples)

    def final_head(self, num_samples: int) -> bytes:
        return framing.flac_header(self._codec.config, num_samples)

    def push(self, pcm_S: Pcm) -> bytes:
        return b"".join(self._codec.push(pcm_S))

    def finish(self) -> bytes:
        return b"".join(self._codec.finish(pads=False))


class _Adts(_Headless):
    SPEC = CodecSpec(name="aac", sample_format="fltp", bit_rate=96_000)

    def __init__(self, stream: _Stream) -> None:
        self._codec = stream.codec(self.SPEC)

    def push(self, pcm_S: Pcm) -> bytes:
        return self._frames(self._codec.push(pcm_S))

    def finish(self) -> bytes:
        return self._frames(self._codec.finish(pads=True))

    def _frames(self, packets: Sequence[bytes]) -> bytes:
        return b"".join(framing.adts_frame(self._codec.config, packet) for packet in packets)


class _Mp3(_Headless):  # the Info frame copies its header from the first packet
    # Without the reservoir every frame stands alone, and comes out one frame sooner.
    SPEC = CodecSpec(
        name="libmp3lame", sample_format="fltp", bit_rate=96_000, options={"reservoir": "0"}
    )

    def __init__(self, stream: _Stream) -> None:
        self._stream, self._codec = stream, stream.codec(self.SPEC)
        self._first_packet = b""

    def push(self, pcm_S: Pcm) -> bytes:
        return self._frames(self._codec.push(pcm_S))

    def finish(self) -> bytes:
        return self._frames(self._codec.finish(pads=True))

    def _frames(self, packets: Sequence[bytes]) -> bytes:
        info = b""
        if packets and not self._first_packet:
            self._first_packet = packets[0]
            info = self._info(self._stream.num_samples)
        return info + b"".join(packets)

    def final_head(self, num_samples: int) -> bytes:
        return self._info(num_samples) if self._first_packet else b""

    def _info(self, num_samples: int | None) -> bytes:
        return framing.mp3_info_frame(self._first_packet, self._codec.frame_size, num_samples)


class _OggOpus(_Headless):  # its last page tells where the sound ends
    SPEC = CodecSpec(name="libopus", sample_format="flt", bit_rate=64_000)

    def __init__(self, stream: _Stream) -> None:
        self._codec = stream.codec(self.SPEC)
        self._pages = framing.OggOpusPages()
        self._scale = framing.OPUS_RATE // stream.sample_rate
        self._granule = 0

    def head(self) -> bytes:
        return self._pages.header(self._codec.config)

    def push(self, pcm_S: Pcm) -> bytes:
        return b"".join(self._whole_pages(self._codec.push(pcm_S)))

    def finish(self) -> bytes:
        # The codec's delay leaves a packet of any sound for the last page, whose position trims it.
        packets = self._codec.finish(pads=True)
        split = (len(packets) - 1) // _PACKETS_PER_PAGE * _PACKETS_PER_PAGE
        pages = b"".join(self._whole_pages(packets[:split]))
        end = self._scale * (self._codec.num_samples + self._codec.delay)
        return pages + self._pages.page(packets[split:], end, is_last=True)

    def _whole_pages(self, packets: Sequence[bytes]) -> Iterator[bytes]:
        for start in range(0, len(packets), _PACKETS_PER_PAGE):
            page = packets[start : start + _PACKETS_PER_PAGE]
            self._granule += len(page) * self._codec.frame_size * self._scale
            yield self._pages.page(page, self._granule)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    content_type: str
    open: Callable[[_Stream], _Container]
    rates: tuple[int, ...] = ()  # () takes all


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
        "pcm": _Kind(content_type="audio/pcm", open=_Pcm, rates=(24000,)),
    }
)
FORMATS = tuple(_KINDS)
"""The formats of `response_format`; mp3 is OpenAI's default."""
