"""Images made up for tests, honest and hostile."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from PIL import Image


def image(width: int = 48, height: int = 32, mode: str = "RGB") -> Image.Image:
    """A gradient in which no two corners are alike."""
    y, x = np.mgrid[0:height, 0:width]
    red, green = x * 255 // max(1, width - 1), y * 255 // max(1, height - 1)
    rgb = np.stack([red, green, np.full_like(red, 60)], axis=-1).astype(np.uint8)
    return Image.fromarray(rgb).convert(mode)


def saved(image: Image.Image, kind: str = "png", **options: Any) -> bytes:
    """The bytes of its file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(kind: str, orientation: int, width: int = 48, height: int = 32) -> bytes:
    """A file whose EXIF says how the camera was held."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if kind != "png" else {}
    return saved(image(width, height), kind, exif=exif, **options)


def hole_mask(width: int, height: int, hole: tuple[int, int, int, int]) -> bytes:
    """A PNG that is opaque but for `hole` (left, top, right, bottom)."""
    mask = Image.new("RGBA", (width, height), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), hole)
    return saved(mask)


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file."""
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG file that declares a size, and holds what it is given."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = (b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), *chunks, chunk(b"IEND", b""))
    return b"".join(parts)


def idat(num_bytes: int) -> bytes:
    """A raster of zeros that takes next to nothing in the file, nor time to make."""
    num_blocks, num_left = divmod(num_bytes, 2**20)
    packer, last = zlib.compressobj(9, wbits=-15), zlib.compressobj(9, wbits=-15)
    block = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)  # may be repeated
    rest = last.compress(bytes(num_left)) + last.flush()
    check = struct.pack(">I", num_bytes % 65521 << 16 | 1)  # Adler-32 of zeros
    return chunk(b"IDAT", b"\x78\xda" + block * num_blocks + rest + check)


def apng(num_frames: int, side: int = 64) -> bytes:
    """An animated PNG of so many whole frames."""
    data = zlib.compress(b"".join(b"\x00" + bytes(3 * side) for _ in range(side)))
    frames, sequence = [], 0
    for n in range(num_frames):
        control = struct.pack(">IIIIIHHBB", sequence, side, side, 0, 0, 1, 10, 0, 0)
        frames.append(chunk(b"fcTL", control))
        sequence += 1
        if n:
            frames.append(chunk(b"fdAT", struct.pack(">I", sequence) + data))
            sequence += 1
        else:
            frames.append(chunk(b"IDAT", data))
    return png(side, side, chunk(b"acTL", struct.pack(">II", num_frames, 0)), *frames)


def webp(width: int, height: int) -> bytes:
    """An extended WebP file that declares a canvas and holds nothing."""
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + sides
    return b"RIFF" + struct.pack("<I", len(body)) + body


def sized_jpeg(width: int, height: int) -> bytes:
    """A JPEG file whose header declares another size than its data has."""
    data = bytearray(saved(image(64, 64), "jpeg"))
    at = data.index(b"\xff\xc0") + 5
    struct.pack_into(">HH", data, at, height, width)
    return bytes(data)


def many_scans(num_scans: int) -> bytes:
    """A progressive JPEG that paints its image over and over."""
    data = saved(image(64, 64), "jpeg", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + (data[last:-2] * num_scans) + data[-2:]


_JP2 = b"\x00\x00\x00\x0cjP  \r\n\x87\n" + b"\x00\x00\x00\x14ftypjp2 " + bytes(64)
_PSD = b"8BPS\x00\x01" + bytes(6) + struct.pack(">HIIHH", 3, 64, 64, 8, 3) + bytes(64)


@cache
def hostile() -> Mapping[str, tuple[bytes, int]]:
    """Files by name, and the status each is answered with."""
    whole = {kind: saved(image(256, 256), kind) for kind in ("png", "jpeg", "webp")}
    files = {
        "nothing": (b"", 400),
        "1x1": (saved(image(1, 1)), 400),
        "1x65535": (png(1, 65535, idat(65535 * 4)), 400),
        "65535x1": (sized_jpeg(65535, 1), 400),
        "1023x7": (saved(image(1023, 7)), 400),
        "20k wide": (png(20_000, 512), 400),
        "0x0": (png(0, 0, idat(0)), 400),
        "2^31 png": (png(2**31 - 1, 2**31 - 1, idat(64)), 400),
        "30k png": (png(30_000, 30_000, idat(2**20)), 400),
        "30k png whole": (png(30_000, 30_000, idat(30_000 * 30_001)), 400),
        "65k jpeg": (sized_jpeg(65_500, 65_500), 400),
        "16k webp": (webp(2**14, 2**14), 400),
        "16m webp": (webp(2**24, 2**24), 400),
        "empty webp": (webp(64, 64), 400),
        "many scans": (many_scans(2000), 400),
        "jp2": (_JP2, 415),
        "psd": (_PSD, 415),
        "gif": (saved(image(), "gif"), 415),
        "bmp": (saved(image(), "bmp"), 415),
        "tiff": (saved(image(), "tiff"), 415),
        "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415),
        "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n", 415),
        "avif": (b"\x00\x00\x00\x20ftypavif" + bytes(64), 415),
        "ico": (saved(image(), "ico"), 415),
        "html": (b"<html><script>alert(1)</script>", 415),
        "gif and script": (b"GIF89a/*" + bytes(64) + b"*/=1;alert(1)", 415),
        "pdf with the magic of png": (b"\x89PNG\r\n\x1a\n%PDF-1.7\n" + bytes(99), 400),
        "jp2 with the magic of jpeg": (b"\xff\xd8\xff" + _JP2, 400),
        "wav with the magic of webp": (b"RIFF\x24\x00\x00\x00WEBPfmt " + bytes(99), 400),
        "idat of another size": (png(64, 64, idat(99)), 400),
        "palette without colours": (png(64, 64, idat(65 * 64), colour=3), 400),
    }
    for kind, data in whole.items():
        files[f"half of {kind}"] = (data[: len(data) // 2], 400)
        files[f"head of {kind}"] = (data[:40], 400)
    return files
