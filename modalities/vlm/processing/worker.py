"""What a child does that prepares pictures: decode one, and run its model's own processor.

Owns the functions that a `DecodePool` runs there. Everything is loaded before the child's walls go
up; torch is hidden from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from triptych.core.engine_api.pixels import Pixels
from triptych.core.media import pictures
from triptych.core.media.pictures import PictureLimits, measure, read_picture
from triptych.modalities.vlm.prepared import PreparedPicture
from triptych.modalities.vlm.processing.probe import hide_torch

if TYPE_CHECKING:
    from triptych.modalities.vlm.processing.processor import PictureProcessor

_SAMPLES = ((64, 64), (320, 48), (48, 320))
"""Pictures that a child processes first, whereby all is loaded that it will need."""

DECODERS: Mapping[str, Any] = MappingProxyType({})


def prepare(models: Mapping[str, Sequence[str]]) -> Mapping[str, Callable[..., Iterator[bytes]]]:
    """Open each model's processor, by name: its folder, and the digest of its weights."""
    hide_torch()
    from triptych.modalities.vlm.processing.processor import PictureProcessor

    pictures.prepare()
    opened = {}
    for name, (folder, digest) in models.items():
        opened[name] = PictureProcessor.open(folder, model=digest)
        for width, height in _SAMPLES:
            opened[name].prepare(Pixels(width=width, height=height, rgb=bytes(3 * width * height)))
    return {"prepare": partial(_prepare, opened)}


def _prepare(
    opened: Mapping[str, PictureProcessor],
    data: bytes,
    *,
    model: str,
    limits: Mapping[str, int],
    **args: Any,
) -> Iterator[bytes]:
    made = prepare_picture(opened[model], data, limits=PictureLimits(**limits), **args)
    yield msgspec.msgpack.encode(made)


def prepare_picture(
    processor: PictureProcessor,
    data: bytes,
    *,
    limits: PictureLimits,
    media_type: str,
    max_pixels: int,
) -> PreparedPicture:
    """Decode a file, and process the picture, scaled down to `max_pixels` if need be.

    Raises `InvalidRequest` or `UnsupportedMedia` for one that is unfit.
    """
    width, height = measure(data, limits=limits, media_type=media_type)
    scale = math.sqrt(max_pixels / (width * height))
    size = (max(1, round(scale * width)), max(1, round(scale * height))) if scale < 1 else None
    picture = read_picture(data, limits=limits, size=size)
    pixels = Pixels(width=picture.width, height=picture.height, rgb=picture.tobytes())
    return processor.prepare(pixels)
