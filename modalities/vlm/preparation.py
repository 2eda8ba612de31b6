"""From a caller's picture file to what its model takes.

Owns the way: decoding and the model's own processor in one limited child, which has everything
loaded before its walls go up, and a bounded memory of what came out, by content: a picture that
comes again is neither decoded nor processed. Knows no prompts. Imports neither torch nor
transformers but where pictures are processed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from triptych.core.config import Config
from triptych.core.images import Pixels
from triptych.core.media import pictures
from triptych.core.media.child import DecodeLimits, DecodePool
from triptych.core.media.fetch import Fetched
from triptych.core.media.pictures import PictureLimits, measure, read_picture
from triptych.core.typed import decode_msgpack
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.vlm.prepared import PreparedPicture
from triptych.modalities.vlm.probe import hide_torch

if TYPE_CHECKING:
    from triptych.modalities.vlm.processor import PictureProcessor

_CHILD_MEMORY_BYTES = 768 * 2**20
"""Of one picture, on top of what a child holds: a processor makes several copies of it."""
_MAX_WAITING = 256
_SAMPLES = ((64, 64), (320, 48), (48, 320))
"""Pictures that a child processes first, whereby all is loaded that it will need."""


class PreparePicture(Protocol):
    """Decodes a file and processes the picture for a model, off the event loop."""

    def __call__(self, file: Fetched, *, model: str, max_pixels: int) -> Awaitable[PreparedPicture]:
        """Raises errors of `core.errors.RequestError`."""
        ...


# -- in a child ----------------------------------------------------------------------------------

DECODERS: Mapping[str, Any] = MappingProxyType({})


def prepare(models: Mapping[str, Sequence[str]]) -> Mapping[str, Callable[..., Iterator[bytes]]]:
    """Open each model's processor, by name: its folder, and the digest of its weights."""
    hide_torch()
    from triptych.modalities.vlm.processor import PictureProcessor

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


# -- in the API process --------------------------------------------------------------------------


class PooledPreparation:
    """Implements `PreparePicture` with limited children: for strangers' pictures."""

    def __init__(self, models: Sequence[ResolvedModel], config: Config) -> None:
        self._limits = PictureLimits()
        self._pool = DecodePool(
            [__name__],
            num_children=config.server.num_decode_children,
            limits=DecodeLimits(
                memory_bytes=_CHILD_MEMORY_BYTES,
                input_bytes=config.server.max_upload_bytes,
                num_waiting=_MAX_WAITING,
            ),
            args={"models": {model.name: [model.folder, model.digest] for model in models}},
        )
        self._pool.start()

    async def __call__(self, file: Fetched, *, model: str, max_pixels: int) -> PreparedPicture:
        """Raises what `DecodePool.run` and `prepare_picture` raise."""
        decoded = await self._pool.run(
            "prepare",
            file.data,
            model=model,
            limits=dataclasses.asdict(self._limits),
            media_type=file.media_type,
            max_pixels=max_pixels,
        )
        return await asyncio.to_thread(decode_msgpack, decoded.data, PreparedPicture)

    async def close(self) -> None:
        """End the children."""
        await self._pool.close()


class InProcessPreparation:
    """Implements `PreparePicture` in a thread of this process: for one's own pictures alone."""

    def __init__(self, model: ResolvedModel) -> None:
        from triptych.modalities.vlm.processor import PictureProcessor

        self._processor = PictureProcessor.open(model.folder, model=model.digest)

    async def __call__(self, file: Fetched, *, model: str, max_pixels: int) -> PreparedPicture:
        """Raises what `prepare_picture` raises."""
        return await asyncio.to_thread(
            prepare_picture,
            self._processor,
            bytes(file.data),
            limits=PictureLimits(max_side=2**15, max_pixels=2**27),
            media_type=file.media_type,
            max_pixels=max_pixels,
        )


class PictureProcessorCache:
    """Prepares pictures, each once: what came out is kept, the least recent gives way."""

    def __init__(self, prepare: PreparePicture, *, max_bytes: int) -> None:
        self._prepare = prepare
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[bytes, PreparedPicture] = OrderedDict()
        self._running: dict[bytes, _Run] = {}

    @classmethod
    def from_config(cls, prepare: PreparePicture, config: Config) -> Self:
        """With the bounds of a configuration."""
        return cls(prepare, max_bytes=config.vision.prepared_pictures_mb * 2**20)

    @property
    def num_bytes(self) -> int:
        """What is kept."""
        return self._num_bytes

    async def look(
        self, file: Fetched, *, model: str, max_pixels: int, tenant: str = ""
    ) -> PreparedPicture:
        """The picture as `model` takes it; each tenant's is prepared for itself.

        Raises what preparing it raises.
        """
        key = await asyncio.to_thread(_key, file, model, max_pixels, tenant)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if key not in self._running:
            work = self._keep(key, self._prepare(file, model=model, max_pixels=max_pixels))
            self._running[key] = _Run(asyncio.create_task(work))
        run = self._running[key]
        run.num_waiting += 1
        try:
            return await asyncio.shield(run.task)
        finally:
            run.num_waiting -= 1
            if not run.num_waiting:  # nobody wants it any more, or it is done
                run.task.cancel()
                self._running.pop(key, None)

    async def _keep(self, key: bytes, work: Awaitable[PreparedPicture]) -> PreparedPicture:
        made = await work
        self._kept[key] = made
        self._num_bytes += made.num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
        return made


@dataclass(slots=True)
class _Run:
    """A picture being prepared, and how many wait for it."""

    task: asyncio.Task[PreparedPicture]
    num_waiting: int = 0


def _key(file: Fetched, model: str, max_pixels: int, tenant: str) -> bytes:
    digest = hashlib.sha256(msgspec.msgpack.encode((model, max_pixels, file.media_type, tenant)))
    digest.update(file.data)
    return digest.digest()
