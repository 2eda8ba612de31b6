"""Formats of weights in blocks of small integers: GGUF's (ggml's quants).

Owns their names and sizes. What the bytes mean is said by `core.runtime.kernels.dequantize`
(torch), core/runtime/kernels/native/blocks.c and `core.runtime.kernels.triton`. No torch here.

Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A row is a sequence of blocks of `num_bytes`, each `num_inputs` weights.

    `native` is its number in the CPU kernels. Rows that are no whole blocks take `fallback`.
    """

    name: str
    num_inputs: int
    num_bytes: int
    native: int
    fallback: str = ""

    def holds(self, num_inputs: int) -> bool:
        """Whether rows of so many inputs are whole blocks."""
        return num_inputs % self.num_inputs == 0

    def row_bytes(self, num_inputs: int) -> int:
        """Bytes of a row."""
        return num_inputs // self.num_inputs * self.num_bytes


FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            BlockFormat("q8_0", 32, 34, 2),
            BlockFormat("q4_0", 32, 18, 3),
            BlockFormat("q4_1", 32, 20, 4),
            BlockFormat("q5_0", 32, 22, 5),
            BlockFormat("q5_1", 32, 24, 6),
            BlockFormat("q4_k", 256, 144, 7, fallback="q5_0"),
            BlockFormat("q5_k", 256, 176, 8, fallback="q5_1"),
            BlockFormat("q6_k", 256, 210, 9, fallback="q8_0"),
        )
    }
)
"""By name, as `--quantization-encoding` and, in capitals, GGUF files say it."""
BLOCK_ENCODINGS = ("q8_0", "q6_k", "q4_k", "q4_1", "q4_0")
"""Those that plain weights are made into when they are asked for."""
