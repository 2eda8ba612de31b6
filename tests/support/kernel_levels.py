"""The levels of instructions that this machine has, for tests that run once on each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from triptych.core.runtime.kernels.native.build import build, supported_levels

if TYPE_CHECKING:
    from triptych.core.runtime.kernels.native.library import NativeKernels

# The tile code over a model of the tile instructions, beside the highest vectors below them.
MODELLED_TILES = "modelled_tiles"
LEVELS: tuple[str, ...] = (*supported_levels(), MODELLED_TILES) if supported_levels() else ()


def open_kernels(isa: str, folder: Path) -> NativeKernels:
    """The native kernels of a level, built into `folder`."""
    from triptych.core.runtime.kernels.native.library import NativeKernels

    if isa == MODELLED_TILES:
        beside = next(level for level in supported_levels() if level != "amx")
        return NativeKernels(build(folder, beside, "MODEL_TILES"), beside)
    kernels = NativeKernels.open("native", folder, isa)
    assert kernels is not None
    return kernels
