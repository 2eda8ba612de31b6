"""A part's weights from a folder, a safetensors file or a GGUF file.

Owns opening them and their stored type. `originals.py` converts tensor names that are not
diffusers'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from triptych.core.block_formats import FORMATS
from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.core.runtime.tensors.checkpoint import Checkpoint, TensorSource
from triptych.core.weights.gguf.convert import block_format, output_dtype, read_blocks, read_values
from triptych.core.weights.gguf.header import GgufFile, open_gguf
from triptych.core.weights.layout import TensorInfo, read_json
from triptych.core.weights.plausible import check_plausible
from triptych.modalities.diffusion.engine.loading.block_rows import BlockRows

_SHAPE_KEY = "comfy.gguf.orig_shape."  # tensors that were flattened before quantization
_GGUF_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Weights(TensorSource, Protocol):
    """Tensors, their model's configuration, and the type most of them are stored in."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The part's config.json."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type to hold them in by default."""
        ...

    def read_packed(self, name: str) -> PackedTensor | None:
        """A matrix in blocks of integers; `None` for any other tensor."""
        ...


@contextmanager
def open_weights(folder: Path, file: Path | None) -> Iterator[Weights]:
    """The weights in a part's folder, or in `file` with the folder's configuration."""
    if file is None:
        with Checkpoint.open(folder) as checkpoint:
            yield checkpoint
    elif file.suffix == ".gguf":
        with open_gguf(file) as gguf:
            weights = GgufWeights(gguf, read_json(folder / "config.json"))
            check_plausible(weights.config, weights.tensors)
            yield weights
    else:
        with Checkpoint.open_file(file, read_json(folder / "config.json")) as checkpoint:
            yield checkpoint


class GgufWeights:
    """Tensors of a GGUF file, one at a time: matrices in their blocks, or dequantized."""

    def __init__(self, file: GgufFile, config: Mapping[str, Any]) -> None:
        self.config = config
        self._file = file
        self._type = output_dtype(file)
        self.dtype = _GGUF_DTYPES[self._type]
        self.tensors = {
            name: TensorInfo(name, self._shape(name), self._type, file.name, self._format(name))
            for name in file.tensors
        }

    def read(self, name: str) -> Tensor:
        """The tensor's values, in bfloat16 if the file is quantized."""
        values = read_values(self._file, self._file.tensors[name], self._type)
        return torch.from_numpy(values).view(self.dtype).reshape(self.tensors[name].shape)

    def read_packed(self, name: str) -> PackedTensor | None:
        """A matrix in blocks. Raises `WeightsError` for non-finite values."""
        form = self.tensors[name].format
        if not form:
            return None
        blocks = read_blocks(self._file, self._file.tensors[name], self._type)
        return PackedTensor(torch.from_numpy(blocks), FORMATS[form])

    def _format(self, name: str) -> str:
        """The block format of a tensor; empty if it was flattened before quantization."""
        is_flat = _SHAPE_KEY + name in self._file.metadata
        return "" if is_flat else block_format(self._file.tensors[name])

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape in the model: some files flatten tensors to fit whole blocks."""
        own = self._file.tensors[name].shape
        given = self._file.metadata.get(_SHAPE_KEY + name)
        if given is None:
            return own
        shape = tuple(int(size) for size in given)
        if torch.Size(shape).numel() != torch.Size(own).numel():
            raise WeightsError(f"Tensor {name!r} in {self._file.name} has a wrong {_SHAPE_KEY}.")
        return shape


class HeldWeights:
    """Converted tensors in memory.

    Each is released when it is read; those in blocks only by `read_packed`.
    """

    def __init__(self, values: Mapping[str, Tensor], given: Weights) -> None:
        self.config, self.dtype = given.config, given.dtype
        self._values = dict(values)
        file = next(iter(given.tensors.values())).file
        self.tensors = {
            name: TensorInfo(name, tuple(tensor.shape), "F32", file, _format_of(tensor))
            for name, tensor in values.items()
        }

    def read(self, name: str) -> Tensor:
        """The tensor's values; a plain tensor can be read once."""
        value = self._values[name]
        if isinstance(value, BlockRows):
            return value.packed.dequantize(value.values_dtype)
        return self._values.pop(name)

    def read_packed(self, name: str) -> PackedTensor | None:
        """A matrix in blocks; it can be read once."""
        value = self._values.get(name)
        if not isinstance(value, BlockRows):
            return None
        del self._values[name]
        return value.packed


def read_rows(weights: Weights, name: str) -> Tensor:
    """A tensor for a name conversion, in blocks if it has any."""
    packed = weights.read_packed(name)
    return weights.read(name) if packed is None else BlockRows.of(packed, weights.dtype)


def _format_of(tensor: Tensor) -> str:
    return tensor.packed.format.name if isinstance(tensor, BlockRows) else ""
