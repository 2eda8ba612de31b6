"""Arguments of adapters in native kernels: their structures of native/kernels.h, for ctypes.

Owns their layout, and the blocks of rows that have an adapter. Calls nothing.

Shapes: T rows, N rows that have an adapter, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_BLOCK_ROWS = 8  # of one task


class LowRankPartPointers(ctypes.Structure):
    """The structure `LowRankPart`."""

    _fields_ = (
        ("up", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("first", "num_outputs", "offset", "rank")),
    )


class LowRankPointers(ctypes.Structure):
    """The structure `LowRank`."""

    _fields_ = (
        ("down", ctypes.c_void_p),
        ("parts", ctypes.POINTER(LowRankPartPointers)),
        *((name, ctypes.c_int64) for name in ("rank", "num_parts")),
    )


class AdaptedBlockPointers(ctypes.Structure):
    """The structure `AdaptedBlock`."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("adapter", "first", "num_rows"))


class AdaptedRowPointers(ctypes.Structure):
    """The structure `AdaptedRows`."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("blocks", ctypes.POINTER(AdaptedBlockPointers)),
        ("num_blocks", ctypes.c_int64),
    )


class NativeLowRank:
    """The change of one projection by one adapter, as the kernels read it.

    `down_RI` makes the low values; each part is its first output, the offset of its low values and
    its matrix `up_OR`. All have one type.
    """

    __slots__ = ("_parts", "_tensors", "pointers")

    def __init__(
        self, down_RI: torch.Tensor, parts: Sequence[tuple[int, int, torch.Tensor]]
    ) -> None:
        down_RI = down_RI.contiguous()
        ups = [up_OR.t().contiguous() for _, _, up_OR in parts]
        self._tensors = (down_RI, *ups)  # kept for the pointers
        self._parts = (LowRankPartPointers * len(parts))(
            *(
                LowRankPartPointers(up_RO.data_ptr(), first, up_RO.shape[1], offset, len(up_RO))
                for (first, offset, _), up_RO in zip(parts, ups, strict=True)
            )
        )
        self.pointers = LowRankPointers(
            down_RI.data_ptr(), self._parts, len(down_RI), len(self._parts)
        )

    @property
    def num_bytes(self) -> int:
        """The bytes in memory."""
        return sum(tensor.nbytes for tensor in self._tensors)


class AdaptedRowBlocks:
    """The rows that have an adapter, those of one adapter together in blocks.

    `adapters_T` is the index of each row's adapter; -1: none.
    """

    __slots__ = ("_blocks", "_rows_N", "pointers")

    def __init__(self, adapters_T: npt.NDArray[np.int64]) -> None:
        order_T = np.argsort(adapters_T, kind="stable")
        self._rows_N = order_T[int((adapters_T < 0).sum()) :].astype(np.int64)
        used, counts = np.unique(adapters_T[self._rows_N], return_counts=True)
        blocks: list[AdaptedBlockPointers] = []
        first = 0
        for adapter, count in zip(used.tolist(), counts.tolist(), strict=True):
            for at in range(0, count, _BLOCK_ROWS):
                size = min(_BLOCK_ROWS, count - at)
                blocks.append(AdaptedBlockPointers(adapter, first + at, size))
            first += count
        self._blocks = (AdaptedBlockPointers * len(blocks))(*blocks)
        self.pointers = AdaptedRowPointers(self._rows_N.ctypes.data, self._blocks, len(blocks))
