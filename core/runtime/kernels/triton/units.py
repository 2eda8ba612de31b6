"""The matrix units of a GPU, by its instruction set.

Owns that knowledge, for launches and for compiling ahead. Loads neither torch nor Triton.
"""

from __future__ import annotations

_FIRST_CUDA_ARCH = 89
_HIP_ARCHES = ("gfx95", "gfx12")


def multiplies_float8(backend: str, arch: str) -> bool:
    """Whether products of e4m3 (`float8_e4m3fn`) have units; `cuda` 90, or `hip` gfx942.

    AMD's gfx942 has another float8.
    """
    if backend == "hip":
        return arch.startswith(_HIP_ARCHES)
    return int(arch) >= _FIRST_CUDA_ARCH
