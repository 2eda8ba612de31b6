"""Images as files: PNG, JPEG and WebP.

Owns encoding. A file holds only pixels: no comment, no date, no program name. Imports no torch.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from PIL import Image

from triptych.core.engine_api.pixels import Pixels

ImageKind = Literal["png", "jpeg", "webp"]
MEDIA_TYPES: Mapping[ImageKind, str] = MappingProxyType(
    {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
)
_FULL_COLOUR_FROM = 90
"""From this quality on, JPEG chroma is not subsampled."""


def encode_image(
    pixels: Pixels,
    *,
    kind: ImageKind = "png",
    compression: int = 100,
    size: tuple[int, int] | None = None,
    keeps_alpha: bool = True,
) -> bytes:
    """Encode an image file. Slow: do not call it on an event loop.

    `compression` is OpenAI's 0 to 100 for JPEG and WebP: 100 is the best quality and the largest
    file. Pixels are scaled to `size` (width, height) if given. Without `keeps_alpha`, and in JPEG,
    the image stands on white.
    """
    image = to_image(pixels)
    if image.mode == "RGBA" and (kind == "jpeg" or not keeps_alpha):
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        image = white
    if size is not None and size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, kind, **_options(kind, compression))
    return file.getvalue()


def to_image(pixels: Pixels) -> Image.Image:
    """The image, with an alpha channel if it has one."""
    size = pixels.width, pixels.height
    image = Image.frombytes("RGB", size, pixels.rgb)
    if pixels.alpha:
        image.putalpha(Image.frombytes("L", size, pixels.alpha))
    return image


def to_pixels(image: Image.Image) -> Pixels:
    """The inverse of `to_image`, for images of any mode."""
    width, height = image.size
    alpha = image.getchannel("A").tobytes() if image.mode == "RGBA" else b""
    return Pixels(width=width, height=height, rgb=image.convert("RGB").tobytes(), alpha=alpha)


def _options(kind: ImageKind, quality: int) -> dict[str, Any]:
    match kind:
        case "png":
            return {"compress_level": 4}
        case "jpeg":
            is_full = quality >= _FULL_COLOUR_FROM
            return {"quality": max(1, quality), "subsampling": "4:4:4" if is_full else "4:2:0"}
        case "webp":
            return {"quality": quality, "method": 4}
