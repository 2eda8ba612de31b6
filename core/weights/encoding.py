"""How `--quantization-encoding` has weights held in memory.

Owns the choice for each matrix: as the checkpoint has it, as plain numbers, or in blocks that are
made of these at load. Reads no tensor. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from triptych.core.block_formats import FORMATS, BlockFormat
from triptych.core.errors import ConfigError
from triptych.core.options.config import ModelOptions
from triptych.core.weights.layout import TensorInfo

AUTO = "auto"
FLOAT8 = "float8_e4m3fn"
STORED_ONLY = (FLOAT8, "float4_e2m1fnx2", "gptq")
"""What only a checkpoint can bring."""
MIN_BLOCK_BYTES = 256 * 2**20
"""GGUF files with less in blocks are taken apart, unless asked for: memory is no matter there, and
plain numbers are more exact and read prompts faster."""
_PLAIN = "plain"
_KEEPING = (AUTO, *FORMATS, *STORED_ONLY)
"""What leaves stored blocks as they are."""


def plain_type(options: ModelOptions, *, takes_blocks: bool = False) -> str:
    """The type that `--dtype` and `--quantization-encoding` name between them, or `auto`.

    Raises `ConfigError` where they name two, or a format of blocks for a model without.
    """
    dtype, encoding = options.dtype, options.quantization_encoding
    if encoding in FORMATS or encoding in STORED_ONLY:
        if not takes_blocks:
            raise ConfigError(
                f"--quantization-encoding {encoding} is for image models, and for models of text,"
                " vision and speech on our decoder; leave it out, or write float32, bfloat16 or"
                " float16."
            )
        return dtype
    if AUTO not in (dtype, encoding) and dtype != encoding:
        raise ConfigError(f"--dtype {dtype} and --quantization-encoding {encoding} do not agree.")
    return encoding if dtype == AUTO else dtype


@dataclass(frozen=True, slots=True)
class WeightEncoding:
    """The wish for one model: `auto`, a plain type, or the name of a format.

    `stored` are the formats of the checkpoint's matrices that are in blocks, by name.
    """

    wanted: str = AUTO
    stored: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, wanted: str, tensors: Mapping[str, TensorInfo], quantized_by: str = ""
    ) -> WeightEncoding:
        """The wish for a checkpoint. Raises `ConfigError` where it has weights of others alone."""
        stored = {name: info.format for name, info in tensors.items() if info.format}
        num_bytes = sum(tensors[name].num_bytes for name in stored)
        if wanted == AUTO and not quantized_by and num_bytes < MIN_BLOCK_BYTES:
            return cls(_PLAIN, stored)
        found = [quantized_by] if quantized_by else sorted(set(stored.values()))
        if wanted in STORED_ONLY and found == [wanted]:
            return cls(wanted, stored)
        if wanted in STORED_ONLY or (wanted in FORMATS and found and wanted not in found):
            raise ConfigError(
                f"--quantization-encoding {wanted}: this model's weights are"
                f" {', '.join(found) or 'plain'}; leave it out, or give a file of the other type."
            )
        return cls(wanted, stored)

    @property
    def has_blocks(self) -> bool:
        """Whether any matrix is held in blocks."""
        return self.wanted in FORMATS or (bool(self.stored) and self.wanted in _KEEPING)

    def as_plain(self) -> WeightEncoding:
        """All matrices as plain numbers, for a model of experts on a GPU.

        Raises `ConfigError` where another form was asked for.
        """
        if self.wanted in FORMATS or self.wanted in STORED_ONLY:
            raise ConfigError(
                f"--quantization-encoding {self.wanted}: experts are multiplied as plain numbers on"
                " a GPU; leave it out, or use --device cpu."
            )
        return replace(self, wanted=_PLAIN)

    def format_of(
        self, name: str, num_inputs: int, *, is_vocabulary: bool = False
    ) -> BlockFormat | None:
        """The format in which a matrix is held; `None`: plain.

        A stored format stays as it is. Others become the format wished for, or its fallback where
        rows are no whole blocks; the vocabulary's has six bits or more, as in llama.cpp's files.
        """
        if name in self.stored and self.wanted in _KEEPING:
            return FORMATS[self.stored[name]]
        made = None if self.stored else FORMATS.get(self.wanted)
        if made is not None and is_vocabulary and made.name != "q8_0":
            made = FORMATS["q6_k"]
        while made is not None and not made.holds(num_inputs):
            made = FORMATS.get(made.fallback)
        return made
