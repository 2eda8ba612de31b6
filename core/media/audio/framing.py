"""Headers, pages and frames around encoded audio in streamed containers.

Owns the byte layouts. Knows nothing of encoders or requests. Muxer libraries are not used, because
they hold back a page or a buffer of bytes, and leave the header incomplete if they cannot seek back
to it.

Sources: Ogg RFC 3533, Ogg Opus RFC 7845, FLAC RFC 9639, ADTS ISO/IEC 13818-7 6.2, WAV the RIFF
specification of 1991, the Info tag gabriel.mp3-tech.org/mp3infotag.html.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

UNKNOWN_SIZE = 0xFFFFFFFF
_REVERSED = bytes(int(f"{value:08b}"[::-1], 2) for value in range(256))
_OGG_SERIAL = 0x7472_6970
_FIRST_PAGE, _LAST_PAGE = 2, 4
OPUS_RATE = 48000
"""The rate (Hz) at which Ogg Opus counts samples, for any input rate."""
_LAME_DELAY = 576  # samples that the encoder prepends
_MP3_DECODER_DELAY = 529  # samples that every decoder prepends to those


def wav_header(sample_rate: int, num_samples: int | None) -> bytes:
    """A header for 16-bit mono; for unknown length, both sizes are the streaming marker."""
    num_bytes = UNKNOWN_SIZE if num_samples is None else 2 * num_samples
    riff_size = min(36 + num_bytes, UNKNOWN_SIZE)
    chunk = struct.pack("<HHIIHH", 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    return struct.pack(
        "<4sI4s4sI16s4sI", b"RIFF", riff_size, b"WAVE", b"fmt ", 16, chunk, b"data", num_bytes
    )


def read_wav_header(data: bytes) -> tuple[int, int] | None:
    """The sample rate of a stream with the header of `wav_header`, and where its samples begin.

    `None` if more of the header is missing.
    """
    size = len(wav_header(0, None))
    return None if len(data) < size else (struct.unpack_from("<I", data, 24)[0], size)


def flac_header(stream_info: bytes, num_samples: int | None) -> bytes:
    """The stream marker and one metadata block; `stream_info`: 34 bytes from the encoder."""
    low_bits = struct.unpack_from(">Q", stream_info, 10)[0] & ~((1 << 36) - 1)
    known = struct.pack(">Q", low_bits | (num_samples or 0))
    return b"fLaC" + bytes([0x80, 0, 0, 34]) + stream_info[:10] + known + stream_info[18:34]


def adts_frame(specific_config: bytes, packet: bytes) -> bytes:
    """One AAC packet after its 7-byte header, built from the AudioSpecificConfig."""
    config = int.from_bytes(specific_config[:2], "big")
    object_type, rate_index, channels = config >> 11, config >> 7 & 15, config >> 3 & 15
    fields = 0xFFF1 << 40 | (object_type - 1) << 38 | rate_index << 34 | channels << 30
    return (fields | (len(packet) + 7) << 13 | 0x7FF << 2).to_bytes(7, "big") + packet


def mp3_info_frame(first_frame: bytes, frame_size: int, num_samples: int | None) -> bytes:
    """A silent frame that declares the encoder's delay, to stand before `first_frame`.

    With `num_samples` it also declares the number of frames and the padding, so that a gapless
    player returns exactly those samples. `frame_size` is in samples.
    """
    has_mpeg1_side_info = first_frame[1] & 0x08
    prefix = first_frame[:4] + bytes(17 if has_mpeg1_side_info else 9)
    # FFmpeg ignores a tag with neither frames nor bytes in it, and plays it as sound.
    padding, count = 0, struct.pack(">II", 2, UNKNOWN_SIZE)
    if num_samples is not None:
        num_frames = -(-(num_samples + _LAME_DELAY + _MP3_DECODER_DELAY) // frame_size)
        padding = num_frames * frame_size - _LAME_DELAY - num_samples
        count = struct.pack(">II", 1, num_frames)
    gap = (_LAME_DELAY << 12 | padding).to_bytes(3, "big")
    tag = prefix + b"Info" + count + b"LAME3.100\x01" + bytes(11) + gap + bytes(10)
    return (tag + struct.pack(">H", _crc16(tag))).ljust(len(first_frame), b"\0")


def _crc16(data: bytes) -> int:
    """The CRC-16/ARC checksum of `data`."""
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xA001 if crc & 1 else 0)
    return crc


class OggOpusPages:
    """The pages of one Ogg Opus stream, in order. Granule positions count 48 kHz samples."""

    def __init__(self) -> None:
        self._num_pages = 0

    def header(self, opus_head: bytes) -> bytes:
        """The two header pages."""
        vendor = b"triptych"
        tags = b"OpusTags" + struct.pack("<I", len(vendor)) + vendor + bytes(4)
        return self.page([opus_head], 0, flags=_FIRST_PAGE) + self.page([tags], 0)

    def page(
        self, packets: Sequence[bytes], granule: int, *, is_last: bool = False, flags: int = 0
    ) -> bytes:
        """One page of whole packets, ending at `granule`; at most 255 segments in total."""
        lacing = b"".join(b"\xff" * (len(p) // 255) + bytes([len(p) % 255]) for p in packets)
        flags |= _LAST_PAGE if is_last else 0
        head = struct.pack("<4sBBqII", b"OggS", 0, flags, granule, _OGG_SERIAL, self._num_pages)
        self._num_pages += 1
        tail = bytes([len(lacing)]) + lacing + b"".join(packets)
        return head + struct.pack("<I", _ogg_crc(head + bytes(4) + tail)) + tail


def _ogg_crc(data: bytes) -> int:
    """Ogg's CRC-32 is zlib's with its bits mirrored and nothing inverted."""
    mirrored = zlib.crc32(data.translate(_REVERSED), UNKNOWN_SIZE) ^ UNKNOWN_SIZE
    return int(f"{mirrored:032b}"[::-1], 2)
