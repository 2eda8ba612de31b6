"""The levels of instructions that this machine has, for tests that run once on each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from triptych.core.kernels.native import build

if TYPE_CHECKING:
    from triptych.core.kernels.native.library import NativeKernels

LEVELS: tuple[str | None, ...] = getattr(build, "supported_levels", lambda: (None,))()


def open_kernels(isa: str | None, folder: Path) -> NativeKernels:
    """The native kernels of a level; `None`: those that the machine gets by itself."""
    from triptych.core.kernels.native.library import NativeKernels

    kernels = NativeKernels.open("native", folder, *([] if isa is None else [isa]))
    assert kernels is not None
    return kernels
