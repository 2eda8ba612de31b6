"""Untrusted images, decoded in confined child processes.

Owns the accepted formats and sizes, and the treatment of transparency (white background), rotation
(upright) and animation (the first image). The bytes decide a file's format, the header whether it
is decoded at all. The functions run in a child of a `DecodePool`; `ImageReader` runs in the API
process. Knows nothing of HTTP or models. Imports no torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import re
import struct
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from PIL import Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from triptych.core.engine_api.pixels import Pixels
from triptych.core.errors import InvalidRequest, PayloadTooLarge, RequestError, UnsupportedMedia
from triptych.core.media.child import Decoded, DecodePool

Size = tuple[int, int]
"""Width and height in pixels."""
_Sized = Generator[bytes, None, Size]

_ANYTHING: Final = frozenset({"", "application/octet-stream"})
_MAGICS: Final = MappingProxyType(
    {
        "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
        "image/jpeg": re.compile(rb"\xff\xd8\xff"),
        "image/webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
    }
)
"""The first bytes of each format."""
_MAX_SCANS: Final = 64
"""Scans of a progressive JPEG; encoders write a dozen, each costs as much as a whole image."""
_BAND_ROWS: Final = 256
_ORIENTATION: Final = 0x0112
_TURNS: Final = MappingProxyType(
    {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
)
"""The transposition to upright, by EXIF orientation; from 5 on width and height swap."""
_FIRST_SIDEWAYS: Final = 5
_MASKED: Final = (255,) * 128 + (0,) * 128
"""The mask value for each alpha value: 255 if less than half opaque."""
_FINE: Final = 2**16
"""Resolution of pixel shares: finer than the smallest share in the largest image."""
_DAMAGE: Final = (
    OSError, SyntaxError, ValueError, LookupError, TypeError, ArithmeticError, AssertionError,
    struct.error, zlib.error,
)  # fmt: skip
"""Exceptions of Pillow for damaged files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits on an image, checked by its header.

    Decoding takes up to 20 bytes per pixel, which a child's memory limit must allow.
    """

    max_bytes: int = 25 * 2**20
    min_side: int = 16
    max_side: int = 8192
    max_pixels: int = 12_500_000

    def check(self, size: Size) -> None:
        """Raise `InvalidRequest` for a size out of range."""
        shown = f"The image is {size[0]}x{size[1]}"
        if min(size) < self.min_side:
            raise InvalidRequest(f"{shown}: each side must have at least {self.min_side} pixels.")
        if max(size) > self.max_side:
            raise InvalidRequest(f"{shown}: a side may have at most {self.max_side} pixels.")
        if size[0] * size[1] > self.max_pixels:
            raise InvalidRequest(f"{shown}: it may have at most {self.max_pixels} pixels.")


# -- in a child ----------------------------------------------------------------------------------


def measure(data: bytes, *, limits: ImageLimits, media_type: str = "") -> Size:
    """Width and height of the upright image, from its header alone.

    `media_type` is the sender's claim. Raises `UnsupportedMedia` if it is not PNG, JPEG or WebP, or
    was sent as something else than an image, `InvalidRequest` if it is damaged or out of range.
    """
    with _open(data, limits, media_type) as file:
        return _turned_size(file.size, _turn(file))


def read_image(
    data: bytes,
    *,
    limits: ImageLimits,
    media_type: str = "",
    size: Size | None = None,
    canvas: Size | None = None,
) -> Image.Image:
    """The upright image in RGB on white. Raises as `measure` does.

    With a `size` it is scaled to cover that size, and its middle is cropped. A larger `canvas` is
    filled from the upper left corner by repeating the last row and column.
    """
    with _open(data, limits, media_type) as file:
        turn, wanted = _load_raster(file, size)
        image = _flatten(file)
        if wanted is not None and wanted != image.size:
            box = _crop_box(image.size, wanted)
            image = image.resize(wanted, Image.Resampling.LANCZOS, box=box)
        return _fill_canvas(image if turn is None else image.transpose(turn), canvas)


def read_mask(
    data: bytes,
    *,
    limits: ImageLimits,
    media_type: str = "",
    size: Size | None = None,
    canvas: Size | None = None,
) -> Image.Image:
    """A grey mask: 255 where the image is less than half opaque, else 0.

    Otherwise as `read_image`; a marked area smaller than a pixel of `size` marks a whole pixel.
    Raises `InvalidRequest` also for an image without transparency, or opaque everywhere or in the
    part that is not cut off.
    """
    with _open(data, limits, media_type) as file:
        turn, wanted = _load_raster(file, size)
        if not file.has_transparency_data:
            raise InvalidRequest(
                "The mask has no transparency: make the region to change transparent."
            )
        alpha = file.convert("RGBA").getchannel("A")
        mask = alpha.point(_MASKED)
        if not mask.getbbox():
            raise InvalidRequest(
                "The mask is opaque everywhere, so nothing would change: make the region to change"
                " transparent (less than half opaque)."
            )
        if wanted is not None and wanted != alpha.size:
            box = _crop_box(alpha.size, wanted)
            scaled = alpha.resize(wanted, Image.Resampling.BOX, box=box).point(_MASKED)
            mask = scaled if scaled.getbbox() else _touched_pixels(mask, wanted, box)
        if not mask.getbbox():
            raise InvalidRequest(
                "The region that the mask marks is cut off, so nothing would change: ask for a size"
                " with the aspect of the image, or leave size out."
            )
        return _fill_canvas(mask if turn is None else mask.transpose(turn), canvas)


def _touched_pixels(
    mask: Image.Image, size: Size, box: tuple[float, float, float, float]
) -> Image.Image:
    """Scale a mask, marking every pixel of which any part was marked."""
    fine = mask.convert("I").point(lambda value: value * _FINE + 0)
    shares = fine.resize(size, Image.Resampling.BOX, box=box)
    return shares.convert("L").point([0] + [255] * 255)  # the conversion clips at 255


def _fill_canvas(image: Image.Image, canvas: Size | None) -> Image.Image:
    """Extend an image from the upper left corner of a canvas by its edges."""
    if canvas is None or canvas == image.size:
        return image
    (width, height), (full_width, full_height) = image.size, canvas
    extended = image.crop((0, 0, *canvas))
    if full_width > width:
        edge = image.crop((width - 1, 0, width, height))
        extended.paste(edge.resize((full_width - width, height)), (width, 0))
    if full_height > height:
        edge = extended.crop((0, height - 1, full_width, height))
        extended.paste(edge.resize((full_width, full_height - height)), (0, height))
    return extended


@contextmanager
def _open(data: bytes, limits: ImageLimits, media_type: str) -> Iterator[ImageFile]:
    """Open a file and check its header; errors in the block count as the sender's."""
    kind = _kind(data, media_type)
    try:
        if kind == "image/webp":
            limits.check(_webp_size(data))  # its decoder allocates memory when opened
        with _OPENERS[kind](io.BytesIO(data)) as file:
            limits.check(file.size)
            if kind == "image/jpeg" and data.count(b"\xff\xda") > _MAX_SCANS:
                raise InvalidRequest(f"The JPEG file has over {_MAX_SCANS} scans; save it again.")
            yield file
    except RequestError:
        raise
    except _DAMAGE as error:
        raise InvalidRequest("The image is damaged or incomplete.") from error


def _kind(data: bytes, media_type: str) -> str:
    """The media type of the bytes, whatever image type was declared.

    Raises `UnsupportedMedia` for other bytes, and for an image declared as something else.
    """
    if not data:
        raise InvalidRequest("The image is empty.")
    kind = next((kind for kind, magic in _MAGICS.items() if magic.match(data)), None)
    if kind is None:
        raise UnsupportedMedia("The file is not a PNG, JPEG or WebP image.")
    declared = media_type.partition(";")[0].strip().lower()
    if declared not in _ANYTHING and not declared.startswith("image/"):
        raise UnsupportedMedia(f"The file is {kind}, which is not the type it was sent as.")
    return kind


def _webp_size(data: bytes) -> Size:
    """Width and height of a WebP file's canvas.

    Format: https://developers.google.com/speed/webp/docs/riff_container
    """
    (chunk,) = struct.unpack_from("4s", data, 12)
    if chunk == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
    elif chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    else:
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    return width, height


_OPENERS: Final = MappingProxyType[str, type[ImageFile]](
    {"image/png": PngImageFile, "image/jpeg": JpegImageFile, "image/webp": WebPImageFile}
)
"""The reader of each format; no other is tried."""


def _turn(file: ImageFile) -> Image.Transpose | None:
    # The base class's method: that of PNG reads the whole image to find later chunks.
    return _TURNS.get(Image.Image.getexif(file).get(_ORIENTATION, 1))


def _turned_size(size: Size, turn: Image.Transpose | None) -> Size:
    sideways = [_TURNS[value] for value in _TURNS if value >= _FIRST_SIDEWAYS]
    return size[::-1] if turn in sideways else size


def _load_raster(file: ImageFile, size: Size | None) -> tuple[Image.Transpose | None, Size | None]:
    """Load the raster. Returns the transposition to upright, and the size before it."""
    turn = _turn(file)
    wanted = None if size is None else _turned_size(size, turn)
    if wanted is not None:
        file.draft(None, wanted)  # JPEG only: decodes at a reduced size
    file.load()
    return turn, wanted


def _flatten(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        if image.has_transparency_data:
            raise InvalidRequest("16-bit grey with a transparent value is not supported; use RGBA.")
        return Image.frombytes("L", image.size, image.tobytes()[1::2]).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    seen = image if image.mode == "RGBA" else image.convert("RGBA")
    ground = Image.new("RGB", image.size, (255, 255, 255))
    ground.paste(seen, mask=seen)
    return ground


def _crop_box(source: Size, target: Size) -> tuple[float, float, float, float]:
    """The largest centered box in `source` with the aspect of `target`.

    Clamped, because rounding may exceed the image by the last bit, which Pillow refuses.
    """
    scale = min(source[0] / target[0], source[1] / target[1])
    spans = [(full, scale * side) for full, side in zip(source, target, strict=True)]
    left, top = (max(0.0, (full - part) / 2) for full, part in spans)
    right, bottom = (
        min(full, start + part) for start, (full, part) in zip((left, top), spans, strict=True)
    )
    return left, top, right, bottom


def _measure(data: bytes, *, limits: Mapping[str, int], media_type: str) -> _Sized:
    size = measure(data, limits=ImageLimits(**limits), media_type=media_type)
    yield from ()
    return size


def _bands(
    read: Callable[..., Image.Image],
    data: bytes,
    *,
    limits: Mapping[str, int],
    media_type: str,
    size: Sequence[int] | None,
    canvas: Sequence[int] | None,
) -> _Sized:
    """Yield the raster of `read` in bands of rows, to avoid a second whole copy."""
    wanted, full = (None if sides is None else tuple(sides) for sides in (size, canvas))
    image = read(
        data, limits=ImageLimits(**limits), media_type=media_type, size=wanted, canvas=full
    )
    for top in range(0, image.height, _BAND_ROWS):
        bottom = min(top + _BAND_ROWS, image.height)
        yield image.crop((0, top, image.width, bottom)).tobytes()
    return image.size


DECODERS: Final[Mapping[str, Callable[..., _Sized]]] = MappingProxyType(
    {
        "measure": _measure,
        "image": partial(_bands, read_image),
        "mask": partial(_bands, read_mask),
    }
)
"""The functions that a `DecodePool` with this module serves."""


def prepare() -> None:
    """Decode an image of each format, to load everything that decoding needs."""
    limits = ImageLimits(min_side=1)
    for kind in ("png", "jpeg", "webp"):
        file = io.BytesIO()
        sample = Image.new("RGB" if kind == "jpeg" else "RGBA", (32, 16))
        exif = Image.Exif()
        exif[_ORIENTATION] = 6
        sample.save(file, kind, exif=exif)
        read_image(file.getvalue(), limits=limits, size=(8, 8))
        if kind != "jpeg":
            read_mask(file.getvalue(), limits=limits, size=(8, 8))


# -- in the API process --------------------------------------------------------------------------


class ImageReader:
    """Reads images through a pool, which must serve this module.

    Without a pool it reads them in a thread, which is safe only for trusted images. Methods raise
    as the functions of the same names, as `DecodePool.run`, and `PayloadTooLarge` for a file over
    `limits.max_bytes`.
    """

    def __init__(self, pool: DecodePool | None) -> None:
        self._pool = pool

    async def measure(
        self,
        data: bytes | bytearray | memoryview,
        *,
        limits: ImageLimits = ImageLimits(),
        media_type: str = "",
    ) -> Size:
        """Width and height of the upright image, from its header alone."""
        decoded = await self._run("measure", data, limits, media_type=media_type)
        width, height = decoded.value
        return width, height

    async def read(
        self,
        data: bytes | bytearray | memoryview,
        *,
        limits: ImageLimits = ImageLimits(),
        media_type: str = "",
        size: Size | None = None,
        canvas: Size | None = None,
    ) -> Pixels:
        """The result of `read_image`."""
        args = {"media_type": media_type, "size": size, "canvas": canvas}
        decoded = await self._run("image", data, limits, **args)
        width, height = decoded.value
        return Pixels(width=width, height=height, rgb=bytes(decoded.data))

    async def read_mask(
        self,
        data: bytes | bytearray | memoryview,
        *,
        limits: ImageLimits = ImageLimits(),
        media_type: str = "",
        size: Size | None = None,
        canvas: Size | None = None,
    ) -> bytes:
        """The result of `read_mask`: height x width bytes."""
        args = {"media_type": media_type, "size": size, "canvas": canvas}
        decoded = await self._run("mask", data, limits, **args)
        return bytes(decoded.data)

    async def _run(
        self,
        name: str,
        data: bytes | bytearray | memoryview,
        limits: ImageLimits,
        **args: Any,
    ) -> Decoded:
        if len(data) > limits.max_bytes:
            raise PayloadTooLarge(f"The image is over {limits.max_bytes} bytes.")
        args["limits"] = dataclasses.asdict(limits)
        if self._pool is None:
            return await asyncio.to_thread(_run_here, DECODERS[name], bytes(data), args)
        return await self._pool.run(name, data, **args)


def _run_here(decode: Callable[..., _Sized], data: bytes, args: Mapping[str, Any]) -> Decoded:
    whole = bytearray()
    pieces = decode(data, **args)
    while True:
        try:
            whole += next(pieces)
        except StopIteration as end:
            return Decoded(memoryview(whole), end.value)
