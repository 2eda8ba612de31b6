"""The encoding of weights in memory, as set by `--quantization-encoding`.

Owns the choice for each matrix: as stored in the checkpoint, as plain numbers, or quantized into
blocks at load. Reads no tensor. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych.core.block_formats import FLOAT8_ROWS, FORMATS, BlockFormat
from triptych.core.errors import ConfigError
from triptych.core.options.config import ModelOptions
from triptych.core.weights.layout import TensorInfo

AUTO = "auto"
FLOAT8 = "float8_e4m3fn"
STORED_ONLY = (FLOAT8, "float4_e2m1fnx2", "gptq")
"""Encodings that only a checkpoint can have; none is quantized at load."""
MIN_BLOCK_BYTES = 256 * 2**20
"""GGUF files with fewer bytes in blocks are dequantized by default: memory does not matter there,
and plain numbers are more exact and process prompts faster."""
_PLAIN = "plain"
_MADE = {**FORMATS, FLOAT8_ROWS.name: FLOAT8_ROWS}
"""Formats that plain weights can be quantized to."""
_KEEPING = (AUTO, *FORMATS, *STORED_ONLY)
"""Encodings that keep stored blocks."""


def plain_type(options: ModelOptions, *, takes_blocks: bool = False) -> str:
    """The plain type set by `--dtype` or `--quantization-encoding`, or `auto`.

    Raises `ConfigError` if they conflict, or for a block format if the model has no blocks.
    """
    dtype, encoding = options.dtype, options.quantization_encoding
    if encoding in FORMATS or encoding in STORED_ONLY:
        if not takes_blocks:
            raise ConfigError(
                f"--quantization-encoding {encoding} is for image models, and for text, vision and"
                " speech models on our own decoder; omit it, or use float32, bfloat16 or float16."
            )
        return dtype
    if AUTO not in (dtype, encoding) and dtype != encoding:
        raise ConfigError(f"--dtype {dtype} and --quantization-encoding {encoding} conflict.")
    return encoding if dtype == AUTO else dtype


@dataclass(frozen=True, slots=True)
class WeightEncoding:
    """The encoding of one model: `wanted` is `auto`, a plain type, or the name of a format.

    `stored` has the formats of the checkpoint's matrices that are in blocks, by name.
    """

    wanted: str = AUTO
    stored: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, wanted: str, tensors: Mapping[str, TensorInfo], quantized_by: str = ""
    ) -> WeightEncoding:
        """The encoding for a checkpoint. Raises `ConfigError` if its stored encoding is another."""
        stored = {name: info.format for name, info in tensors.items() if info.format}
        num_bytes = sum(tensors[name].num_bytes for name in stored)
        if wanted == AUTO and not quantized_by and num_bytes < MIN_BLOCK_BYTES:
            return cls(_PLAIN, stored)
        found = [quantized_by] if quantized_by else sorted(set(stored.values()))
        if wanted in STORED_ONLY and found == [wanted]:
            return cls(wanted, stored)
        if wanted in STORED_ONLY or (wanted in _MADE and found and wanted not in found):
            named = FLOAT8 if wanted == FLOAT8_ROWS.name else wanted
            raise ConfigError(
                f"--quantization-encoding {named}: this model's weights are"
                f" {', '.join(found) or 'plain'}; omit the option, or use a file in that encoding."
            )
        return cls(wanted, stored)

    @property
    def is_made(self) -> bool:
        """Whether plain matrices are quantized at load."""
        return self.wanted in _MADE

    @property
    def keeps_stored(self) -> bool:
        """Whether stored blocks are kept."""
        return self.wanted in _KEEPING

    @property
    def has_blocks(self) -> bool:
        """Whether any matrix is held in blocks."""
        return self.wanted in FORMATS or (bool(self.stored) and self.keeps_stored)

    def format_of(
        self, name: str, num_inputs: int, *, is_vocabulary: bool = False
    ) -> BlockFormat | None:
        """The format of a matrix in memory; `None`: plain.

        A stored format is kept. Other matrices get the wanted format, or its fallback if rows are
        not whole blocks; the vocabulary's has at least six bits, as in llama.cpp's files, and stays
        plain where others are in float8.
        """
        if name in self.stored and self.keeps_stored:
            return FORMATS[self.stored[name]]
        made = None if self.stored else _MADE.get(self.wanted)
        if made is FLOAT8_ROWS and is_vocabulary:
            return None
        if made is not None and is_vocabulary and made.name != "q8_0":
            made = FORMATS["q6_k"]
        while made is not None and not made.holds(num_inputs):
            made = FORMATS.get(made.fallback)
        return made


PLAIN = WeightEncoding(_PLAIN)
"""Weights as plain numbers, however they are stored."""
