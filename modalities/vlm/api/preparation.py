"""From an image file to its model's inputs, and the facts about a model that the API needs.

Owns image preparation in a limited child process (`processing.worker`), and a bounded cache of its
results by content: a repeated image is neither decoded nor processed again. transformers knows the
defaults of every configuration, but loads torch if installed, which the API process must not: so
the program `processing.probe` reads the facts, and the result is cached on disk for later starts.
Knows no prompts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol, Self

import msgspec

from triptych.core.errors import WeightsError
from triptych.core.media.child import DecodeLimits, DecodePool
from triptych.core.media.fetch import Fetched
from triptych.core.media.images import ImageLimits
from triptych.core.options.config import Config
from triptych.core.process.atomic_files import write_whole
from triptych.core.process.lazy import load
from triptych.core.process.typed import decode_json, decode_msgpack
from triptych.core.weights.cache import WeightsCache
from triptych.core.weights.manifest import sha256_file
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.vlm.prepared import FactsReply, PreparedImage, VisionFacts

_PROCESSING = "triptych.modalities.vlm.processing"
_CHILD_MEMORY_BYTES = 768 * 2**20
"""Memory per image, in addition to a child's own: a processor makes several copies of it."""
_MAX_WAITING = 256
CLIENT_IMAGES = ImageLimits()
"""The limits of images that clients send."""
LOCAL_IMAGES = ImageLimits(max_side=2**15, max_pixels=2**27)
"""The limits of images that a user of this process gives."""
_PROBE_TIMEOUT_S = 120.0


class PrepareImage(Protocol):
    """Decodes a file and processes the image for a model, off the event loop."""

    def __call__(self, file: Fetched, *, model: str, max_pixels: int) -> Awaitable[PreparedImage]:
        """Raise errors of `core.errors.RequestError`."""
        ...


class PooledPreparation:
    """Implements `PrepareImage` with limited child processes: for untrusted images."""

    def __init__(
        self,
        models: Sequence[ResolvedModel],
        config: Config,
        *,
        limits: ImageLimits = CLIENT_IMAGES,
        num_children: int = 0,
    ) -> None:
        self.names = [model.name for model in models]
        self._limits = limits
        self._pool = DecodePool(
            [f"{_PROCESSING}.worker"],
            num_children=num_children or config.server.num_decode_children,
            limits=DecodeLimits(
                memory_bytes=_CHILD_MEMORY_BYTES,
                input_bytes=config.server.max_upload_bytes,
                num_waiting=_MAX_WAITING,
            ),
            args={"models": {model.name: [model.folder, model.digest] for model in models}},
        )
        self._pool.start()

    async def __call__(self, file: Fetched, *, model: str, max_pixels: int) -> PreparedImage:
        """Raise the errors of `DecodePool.run` and `prepare_image`."""
        decoded = await self._pool.run(
            "prepare",
            file.data,
            model=model,
            limits=dataclasses.asdict(self._limits),
            media_type=file.media_type,
            max_pixels=max_pixels,
        )
        return await asyncio.to_thread(decode_msgpack, decoded.data, PreparedImage)

    async def close(self) -> None:
        """End the child processes."""
        await self._pool.close()


class InProcessPreparation:
    """Implements `PrepareImage` in a thread of this process: for trusted images only."""

    def __init__(self, model: ResolvedModel) -> None:
        opened = load(f"{_PROCESSING}.processor:ImageProcessor")
        self._prepare = load(f"{_PROCESSING}.worker:prepare_image")
        self._processor = opened.open(model.folder, model=model.digest)

    async def __call__(self, file: Fetched, *, model: str, max_pixels: int) -> PreparedImage:
        """Raise the errors of `prepare_image`."""
        return await asyncio.to_thread(
            self._prepare,
            self._processor,
            bytes(file.data),
            limits=LOCAL_IMAGES,
            media_type=file.media_type,
            max_pixels=max_pixels,
        )


class ImageProcessorCache:
    """Prepares images, each once; keeps the results and drops the least recently used."""

    def __init__(self, prepare: PrepareImage, *, max_bytes: int) -> None:
        self._prepare = prepare
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[bytes, PreparedImage] = OrderedDict()
        self._running: dict[bytes, _Run] = {}

    @classmethod
    def from_config(cls, prepare: PrepareImage, config: Config) -> Self:
        """Open a cache with the configured limits."""
        return cls(prepare, max_bytes=config.vision.prepared_images_mb * 2**20)

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached images."""
        return self._num_bytes

    async def prepared(
        self, file: Fetched, *, model: str, max_pixels: int, tenant: str = ""
    ) -> PreparedImage:
        """The image as input of `model`, cached per tenant. Raises the errors of preparation."""
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
            if not run.num_waiting:  # done, or no longer needed
                run.task.cancel()
                self._running.pop(key, None)

    async def _keep(self, key: bytes, work: Awaitable[PreparedImage]) -> PreparedImage:
        prepared = await work
        self._kept[key] = prepared
        self._num_bytes += prepared.num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
        return prepared


@dataclass(slots=True)
class _Run:
    """An image being prepared, and the number of its waiting callers."""

    task: asyncio.Task[PreparedImage]
    num_waiting: int = 0


def _key(file: Fetched, model: str, max_pixels: int, tenant: str) -> bytes:
    digest = hashlib.sha256(msgspec.msgpack.encode((model, max_pixels, file.media_type, tenant)))
    digest.update(file.data)
    return digest.digest()


def load_facts(models: Sequence[ResolvedModel], cache_dir: str) -> tuple[VisionFacts, ...]:
    """The facts of each model, from the cache or from `probe_facts`, whose errors it raises.

    The cache key covers the folders' contents and the versions. An unwritable folder is no error.
    """
    file = WeightsCache.open(cache_dir).facts / f"{_origin(models)}.json"
    with suppress(OSError, msgspec.MsgspecError):
        facts = decode_json(file.read_bytes(), FactsReply).facts
        if len(facts) == len(models):
            return facts
    facts = probe_facts([model.folder for model in models])
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, [msgspec.json.encode(FactsReply(facts))], is_durable=False)
    return facts


def _origin(models: Sequence[ResolvedModel]) -> str:
    """A digest of all inputs of the facts; `model.digest` does not cover the processor's files."""
    content = [
        (model.digest, [(file.name, sha256_file(file)) for file in _config_files(model)])
        for model in models
    ]
    known = (version("triptych"), version("transformers"), content)
    return hashlib.sha256(msgspec.msgpack.encode(known)).hexdigest()


def _config_files(model: ResolvedModel) -> list[Path]:
    return sorted(Path(model.folder).glob("*.json"))


def probe_facts(folders: Sequence[str]) -> tuple[VisionFacts, ...]:
    """The facts of each folder, in order. Raises the errors of `read_facts`."""
    try:
        done = subprocess.run(
            (sys.executable, "-P", "-m", "triptych.modalities.vlm.processing.probe"),
            input=msgspec.json.encode(folders),
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise WeightsError("Reading the configuration of a vision model timed out.") from error
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").splitlines() or ["no reason given"]
        raise WeightsError(
            f"The configuration of a vision model cannot be read: {lines[-1][-300:]}"
        )
    answer = decode_json(done.stdout, FactsReply)
    if answer.error:
        raise WeightsError(answer.error)
    return answer.facts
