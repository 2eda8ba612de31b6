"""Block-quantized weight formats of GGUF (ggml's quants).

Owns their names and sizes. `core.runtime.kernels.dequantize` (torch),
core/runtime/kernels/native/blocks.c and `core.runtime.kernels.triton` decode the bytes. Knows no
torch.

Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A block format: each block holds `num_inputs` weights in `num_bytes`.

    `native` is its number in the CPU kernels. Rows that are not whole blocks use `fallback`. A row
    has `row_scale_bytes` besides its blocks.
    """

    name: str
    num_inputs: int
    num_bytes: int
    native: int
    fallback: str = ""
    row_scale_bytes: int = 0

    def holds(self, num_inputs: int) -> bool:
        """Whether `num_inputs` is a multiple of the block size."""
        return num_inputs % self.num_inputs == 0

    def row_bytes(self, num_inputs: int) -> int:
        """Return the bytes of a row."""
        return num_inputs // self.num_inputs * self.num_bytes + self.row_scale_bytes


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
            BlockFormat("mxfp4", 32, 17, 10),
            BlockFormat("iq4_nl", 32, 18, 11),
            BlockFormat("iq4_xs", 256, 136, 12, fallback="iq4_nl"),
        )
    }
)
"""Formats by name, as in `--quantization-encoding` and, in capitals, in GGUF files."""
FLOAT8_ROWS = BlockFormat("float8_rows", 16, 16, native=-1, row_scale_bytes=4)
"""Floats of eight bits (e4m3) with a scale for each row: what matrix units of GPUs multiply."""
BLOCK_ENCODINGS = ("q8_0", "q6_k", "q4_k", "q4_1", "q4_0", "mxfp4")
"""Formats that plain weights can be quantized to at load."""
