"""Audio files written while their sound is still being made: one encoder object per response.

Owns encoding and its formats. Knows nothing of models, requests or sockets. The encoder is
started once and never restarted, so a chunk's edge leaves no trace in the sound, and the bytes
returned so far always decode. For the same samples the sound is the same, however they were cut.

Latency is how many samples may have gone in that a decoder cannot yet give back: those that wait
for a whole frame, plus those that the codec looks ahead. Silence is what a player that ignores
the declared delay hears in front.

    format  rate                         latency in samples              declared in the container
    pcm     24 kHz, as OpenAI's clients  0                               -
            expect
    wav     any                          0                               length, where known
    flac    any                          one frame, 20 ms                length, where known
    opus    8, 12, 16, 24, 48 kHz        one frame, 20 ms, and 6.5 ms    delay, exact end
    mp3     8 to 48 kHz, nine rates      at 24 kHz 2256 (94 ms),         delay; frames and padding
                                         at 48 kHz 3408 (71 ms)          where the length is known
    aac     8 to 96 kHz, twelve rates    3071 (128 ms at 24 kHz)         nothing: ADTS cannot; 1024
                                                                         samples of silence
    A rate that the codec does not take is raised to the next one that it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Literal, Protocol, get_args

import av
import numpy as np

from triptych.core.errors import InvalidRequest
from triptych.modalities.tts.audio import framing
from triptych.modalities.tts.audio.resampling import Pcm, Resampler, audio_frame

AudioFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
FORMATS: tuple[AudioFormat, ...] = get_args(AudioFormat)

_PACKETS_PER_PAGE = 32  # of at most 6 segments, where 255 fit
_MPEG_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)


class AudioEncoder:
    """One response's audio in one container. Not thread-safe; holds less than two frames."""

    def __init__(self, container: _Container, content_type: str, resampler: Resampler) -> None:
        self.content_type = content_type
        self._container = container
        self._resampler = resampler
        self._head = container.head()
        self._is_finished = False

    def encode(self, pcm_S: Pcm) -> bytes:
        """Take the next samples, mono, any number; return the bytes that are ready, maybe none.

        Samples beyond full scale are clipped; NaN and infinity become silence.
        """
        assert not self._is_finished
        assert pcm_S.ndim == 1
        finite = np.nan_to_num(pcm_S.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
        return self._take_head() + self._container.push(_clip(self._resampler.push(finite)))

    def finish(self) -> bytes:
        """End the stream and return its last bytes. Nothing may follow."""
        assert not self._is_finished
        self._is_finished = True
        tail = self._container.push(_clip(self._resampler.flush()))
        return self._take_head() + tail + self._container.finish()

    def _take_head(self) -> bytes:
        head, self._head = self._head, b""
        return head


def open_encoder(
    format: str,  # noqa: A002 - the name it has in the request
    sample_rate: int,
    *,
    num_samples: int | None = None,
    bit_rate: int | None = None,
) -> AudioEncoder:
    """Start one response in `format`, one of `FORMATS`, fed with mono at `sample_rate` (Hz).

    Where `num_samples` is known, the header says so; exactly so many must then be encoded.
    `bit_rate` (bits per second) is for mp3, opus and aac. Raises InvalidRequest for any other
    format.
    """
    if (kind := _FORMATS.get(format)) is None:
        msg = f"response_format must be one of {', '.join(FORMATS)}"
        raise InvalidRequest(msg, param="response_format")
    higher = (rate for rate in kind.rates if rate >= sample_rate)
    rate = min(higher, default=max(kind.rates, default=sample_rate)) if kind.rates else sample_rate
    resampler = Resampler(sample_rate, rate)
    length = None if num_samples is None else resampler.target_length(num_samples)
    container = kind.container(kind.codec and Codec(kind.codec, rate, bit_rate), length)
    return AudioEncoder(container, resampler)


def encode_clip(format: str, sample_rate: int, pcm_S: Pcm) -> bytes:  # noqa: A002
    """A whole clip as one file, which declares its length where the format can."""
    encoder = open_encoder(format, sample_rate, num_samples=len(pcm_S))
    return encoder.encode(pcm_S) + encoder.finish()


def _clip(pcm_S: Pcm) -> Pcm:
    return np.clip(pcm_S, -1.0, 1.0)


def _to_int16(pcm_S: Pcm) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    return np.rint(pcm_S * 32767).astype("<i2")


class _Container(Protocol):
    def head(self) -> bytes: ...
    def push(self, pcm_S: Pcm) -> bytes: ...
    def finish(self) -> bytes: ...


class _Samples:
    """Bare 16-bit samples behind a header."""

    def __init__(self, head: bytes) -> None:
        self._head = head

    def head(self) -> bytes:
        return self._head

    def push(self, pcm_S: Pcm) -> bytes:
        return _to_int16(pcm_S).tobytes()

    def finish(self) -> bytes:
        return b""


class _Packets:
    """Codec packets, each or all of them behind a header."""

    def __init__(self, codec: Codec, num_samples: int | None) -> None:
        self._codec = codec
        self._num_samples = num_samples

    def head(self) -> bytes:
        return b""

    def push(self, pcm_S: Pcm) -> bytes:
        return self._frame(self._codec.push(pcm_S))

    def finish(self) -> bytes:
        return self._frame(self._codec.finish(pads=True))

    def _frame(self, packets: Sequence[bytes]) -> bytes:
        raise NotImplementedError


class _Flac(_Packets):
    def head(self) -> bytes:
        return framing.flac_header(self._codec.config, self._num_samples)

    def finish(self) -> bytes:
        return self._frame(self._codec.finish(pads=False))

    def _frame(self, packets: Sequence[bytes]) -> bytes:
        return b"".join(packets)


class _Adts(_Packets):
    def _frame(self, packets: Sequence[bytes]) -> bytes:
        config = self._codec.config
        return b"".join(framing.adts_frame(config, packet) for packet in packets)


class _Mp3(_Packets):
    _has_info = False

    def _frame(self, packets: Sequence[bytes]) -> bytes:
        info = b""
        if packets and not self._has_info:
            self._has_info = True
            info = framing.mp3_info_frame(packets[0], self._codec.frame_size, self._num_samples)
        return info + b"".join(packets)


class _OggOpus(_Packets):
    def __init__(self, codec: Codec, num_samples: int | None) -> None:
        super().__init__(codec, num_samples)
        self._pages = framing.OggOpusPages()
        self._scale = framing.OPUS_RATE // codec.sample_rate
        self._granule = 0

    def head(self) -> bytes:
        return self._pages.header(self._codec.config)

    def push(self, pcm_S: Pcm) -> bytes:
        return b"".join(self._whole_pages(self._codec.push(pcm_S)))

    def finish(self) -> bytes:
        # The codec's delay always leaves a packet for the last page, whose position trims it.
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
