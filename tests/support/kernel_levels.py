"""The levels of instructions that this machine has, for tests that run once on each."""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from support.tiers import among
from triptych.core.runtime.kernels.native.build import build, supported_levels
from triptych.core.weights.cache import WeightsCache

if TYPE_CHECKING:
    from triptych.core.runtime.kernels.native.library import NativeKernels

# The tile code over a model of the tile instructions, beside the highest vectors below them.
MODELLED_TILES = "modelled_tiles"
LEVELS: tuple[str, ...] = (*supported_levels(), MODELLED_TILES) if supported_levels() else ()
FLOAT32_LEVELS = tuple(
    level for level in LEVELS if level not in ("amx", "avx512_bf16", MODELLED_TILES)
)
"""Those that differ in float32: the others add instructions for bfloat16 and bytes alone."""
EACH_LEVEL = among(LEVELS, {*LEVELS[:1], *LEVELS[-2:]})
"""Of these the highest, the portable one and the modelled tiles are in the default tier."""
FOLDER = Path(tempfile.gettempdir(), f"triptych-test-kernels-{os.getuid()}")
"""Kernels of all runs of a user: the name of each says what it was built from."""


@cache
def open_kernels(isa: str) -> NativeKernels:
    """The native kernels of a level, built once for all processes and runs."""
    from triptych.core.runtime.kernels.native.library import NativeKernels

    with FileLock(f"{FOLDER}.{isa}.lock"):
        if isa == MODELLED_TILES:
            beside = next(level for level in supported_levels() if level != "amx")
            return NativeKernels(build(FOLDER, beside, "MODEL_TILES"), beside)
        kernels = NativeKernels.open("native", FOLDER, isa)
    assert kernels is not None
    return kernels


def cache_with_kernels(folder: Path) -> Path:
    """`folder` as a `cache_dir` that has the kernels which users of this machine get."""
    if LEVELS:
        library = open_kernels(LEVELS[0]).path
        kernels = WeightsCache(folder).kernels
        kernels.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (kernels / library.name).exists():  # it may be loaded
            shutil.copy(library, kernels)
    return folder
