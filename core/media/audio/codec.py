"""One libavcodec encoder, fed with whole frames.

Owns the frames that wait to be full, the codec's delay, and how many packets the sound needs.
Knows nothing of containers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType

import av
import numpy as np
import numpy.typing as npt

from triptych.core.media.audio.resampling import Pcm, audio_frame


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """What libavcodec calls an encoder, and how it is set."""

    name: str
    sample_format: str
    bit_rate: int | None = None
    frame_s: Fraction | None = None
    """Seconds of a frame, where the codec leaves its size open."""
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def to_int16(pcm_S: Pcm) -> npt.NDArray[np.int16]:
    """Round full scale to the 16-bit range, symmetrically. The samples are within full scale."""
    return np.rint(pcm_S * 32767).astype(np.int16)


class PacketEncoder:
    """Packets of one mono stream at `sample_rate` (Hz)."""

    def __init__(self, spec: CodecSpec, sample_rate: int, bit_rate: int | None) -> None:
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
        """What a decoder must know before the first packet."""
        self.delay = 0
        """Samples in front of the sound in the first packet, once there was one."""
        self.num_samples = 0
        self._context = context
        self._sample_format = spec.sample_format
        self._pending: Pcm = np.zeros(0, np.float32)
        self._num_packets = self._num_in = 0

    def push(self, pcm_S: Pcm) -> list[bytes]:
        """Take samples within full scale and return the packets that are ready."""
        self.num_samples += len(pcm_S)
        pending = np.concatenate([self._pending, pcm_S])
        num_whole = len(pending) - len(pending) % self.frame_size
        self._pending = pending[num_whole:].copy()
        frames = pending[:num_whole].reshape(-1, self.frame_size)
        return [packet for frame_S in frames for packet in self._encode(frame_S)]

    def finish(self, *, pads: bool) -> list[bytes]:
        """Return the last packets; where `pads`, silence fills the last frame."""
        num_before = self._num_packets
        tail = self._pending
        if pads:
            tail = np.pad(tail, (0, -len(tail) % self.frame_size))
        packets = [*(self._encode(tail) if len(tail) else ()), *self._encode(None)]
        # Drained codecs add silence of their own; what lies behind the sound is not sent.
        num_needed = -(-(self.num_samples + self.delay) // self.frame_size)
        assert self._num_packets >= num_needed
        return packets[: num_needed - num_before]

    def _encode(self, frame_S: Pcm | None) -> list[bytes]:
        frame = None
        if frame_S is not None:
            samples = to_int16(frame_S) if self._sample_format == "s16" else frame_S
            frame = audio_frame(samples, self._sample_format, self.sample_rate, self._num_in)
            self._num_in += len(frame_S)
        packets = [packet for packet in self._context.encode(frame) if packet.size]
        if packets and not self._num_packets:
            self.delay = -(packets[0].pts or 0)
        self._num_packets += len(packets)
        return [bytes(packet) for packet in packets]
