"""The matrix units of a GPU, by its instruction set.

Owns that knowledge, for launches and for compiling ahead. Loads neither torch nor Triton.
"""

from __future__ import annotations

from typing import Literal

MatrixUnits = Literal["mma", "wgmma", "mfma"]
"""By their instructions: of a warp, of a group of four warps (sm_90, sm_100), and AMD's."""

_FIRST_CUDA_ARCH = 89
_GROUP_MAJORS = (9, 10)
_HIP_ARCHES = ("gfx95", "gfx12")


def multiplies_float8(backend: str, arch: str) -> bool:
    """Whether products of e4m3 (`float8_e4m3fn`) have units; `cuda` 90, or `hip` gfx942.

    AMD's gfx942 has another float8. A CPU, whose backend is empty, has none.
    """
    if not backend:
        return False
    if backend == "hip":
        return arch.startswith(_HIP_ARCHES)
    return int(arch) >= _FIRST_CUDA_ARCH


def matrix_units(backend: str, arch: str) -> MatrixUnits:
    """Name the matrix units of `cuda` 90, or `hip` gfx942."""
    if backend == "hip":
        return "mfma"
    return "wgmma" if int(arch) // 10 in _GROUP_MAJORS else "mma"
