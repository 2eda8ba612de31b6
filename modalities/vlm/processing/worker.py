"""The child process that prepares images: decodes a file, and runs its model's own processor.

Owns the functions that a `DecodePool` runs there. Everything is loaded before the child's limits
are set; torch is hidden from it, unless a processor needs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from triptych.core.engine_api.pixels import Pixels
from triptych.core.media import images
from triptych.core.media.images import ImageLimits, measure, read_image
from triptych.modalities.vlm.prepared import PreparedImage
from triptych.modalities.vlm.processing.libraries import choose_libraries

if TYPE_CHECKING:
    from triptych.modalities.vlm.processing.processor import ImageProcessor

_NO_MEMORY = "can't allocate memory"

DECODERS: Mapping[str, Any] = MappingProxyType({})


def prepare(models: Mapping[str, Sequence[str]]) -> Mapping[str, Callable[..., Iterator[bytes]]]:
    """Open each model's processor, by name: its folder, and the digest of its weights."""
    choose_libraries(folder for folder, _ in models.values())
    from triptych.modalities.vlm.processing.processor import ImageProcessor

    images.prepare()
    opened = {}
    for name, (folder, digest) in models.items():
        opened[name] = ImageProcessor.open(folder, model=digest)
        opened[name].try_samples()
    return {"prepare": partial(_prepare, opened)}


def _prepare(
    opened: Mapping[str, ImageProcessor],
    data: bytes,
    *,
    model: str,
    limits: Mapping[str, int],
    **args: Any,
) -> Iterator[bytes]:
    try:
        made = prepare_image(opened[model], data, limits=ImageLimits(**limits), **args)
    except RuntimeError as error:
        if _NO_MEMORY in str(error):  # torch's own words
            raise MemoryError from error
        raise
    yield msgspec.msgpack.encode(made)


def prepare_image(
    processor: ImageProcessor,
    data: bytes,
    *,
    limits: ImageLimits,
    media_type: str,
    max_pixels: int,
) -> PreparedImage:
    """Decode a file, and process the image, scaled down to `max_pixels` if needed.

    Raises `InvalidRequest` or `UnsupportedMedia` for an unfit image.
    """
    width, height = measure(data, limits=limits, media_type=media_type)
    scale = math.sqrt(max_pixels / (width * height))
    size = (max(1, round(scale * width)), max(1, round(scale * height))) if scale < 1 else None
    image = read_image(data, limits=limits, size=size)
    pixels = Pixels(width=image.width, height=image.height, rgb=image.tobytes())
    return processor.prepare(pixels)
