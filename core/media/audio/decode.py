"""Uploaded clips, decoded in confined child processes.

Owns the function that a child runs, and the reader that the API process calls. `intake` decides
which files are read, and when reading stops. Imports no torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from triptych.core.media.audio.containers import encode_clip
from triptych.core.media.audio.intake import ClipLimits, read_clip, stream_clip
from triptych.core.media.audio.resampling import Pcm
from triptych.core.media.child import DecodePool


def _decode_clip(data: bytes, *, sample_rate: int, limits: Mapping[str, Any]) -> Iterator[Pcm]:
    return stream_clip(data, sample_rate=sample_rate, limits=ClipLimits(**limits))


DECODERS: Final = MappingProxyType({"clip": _decode_clip})
"""The functions that a `DecodePool` with this module serves."""


def prepare() -> None:
    """Load all of PyAV, which imports many modules only when a file first needs them."""
    import av

    for module in pkgutil.walk_packages(av.__path__, "av."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    clip = encode_clip("wav", 8000, np.zeros(8000, np.float32))
    limits = ClipLimits(max_bytes=len(clip), max_seconds=2)
    for _ in stream_clip(clip, sample_rate=16000, limits=limits):
        pass


class ClipReader:
    """Reads clips through a pool, which must serve this module.

    Without a pool it reads them on a thread, which is safe only for trusted files.
    """

    def __init__(self, pool: DecodePool | None) -> None:
        self._pool = pool

    async def read(
        self, data: bytes | bytearray | memoryview, *, sample_rate: int, limits: ClipLimits
    ) -> Pcm:
        """Decode all of `data` to mono samples [S] at `sample_rate` (Hz).

        Raises as `intake.stream_clip` and `DecodePool.run` do.
        """
        if self._pool is None:
            whole = bytes(data)
            return await asyncio.to_thread(read_clip, whole, sample_rate=sample_rate, limits=limits)
        decoded = await self._pool.run(
            "clip", data, sample_rate=sample_rate, limits=dataclasses.asdict(limits)
        )
        pcm_S: Pcm = np.frombuffer(decoded.data, np.float32)
        return pcm_S
