"""Clips decoded as ever, but for one whose file brings its decoder down."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from triptych.core.media.audio import decode
from triptych.core.media.audio.resampling import Pcm

MODULE = "support.crashing_clip_decoder"
CRASHING = b"CRASH" * 1000
prepare = decode.prepare


def clip(data: bytes, **args: Any) -> Iterator[Pcm]:
    if data == CRASHING:
        ctypes.string_at(0)
    return decode.DECODERS["clip"](data, **args)


DECODERS = {"clip": clip}
