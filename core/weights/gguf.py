"""Converting a GGUF file into a folder of safetensors, configs and tokenizer files.

Owns the data path: read a few rows, undo llama.cpp's row order, append. Matrices in blocks of
integers are kept (see `core.block_formats`), other tensors of such a file become bfloat16;
unquantized files keep their type. `gguf_config` maps names and configs, `gguf_tokenizer` builds the
tokenizer. The `gguf` library dequantizes, here only to check for NaN and infinity; no data reaches
it before `gguf_header` has checked all bounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from triptych.core.block_formats import FORMATS
from triptych.core.errors import WeightsError
from triptych.core.weights.gguf_config import GgufModel, describe
from triptych.core.weights.gguf_header import GgufFile, GgufTensor, open_gguf
from triptych.core.weights.gguf_tokenizer import tokenizer_files
from triptych.core.weights.layout import DTYPE_BYTES, SINGLE_NAME
from triptych.core.weights.progress import Progress

SUPPORTED_KINDS = frozenset({
    Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K,
    Kind.Q5_0, Kind.Q5_1,  # used by K-quantized files for rows not a multiple of 256
})  # fmt: skip
CHUNK_VALUES = 1 << 21
_UNQUANTIZED = {Kind.F32: "F32", Kind.F16: "F16"}
_EXPONENT_BITS = {
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}

Array = np.ndarray[Any, np.dtype[Any]]


def convert_gguf(
    source: Path,
    folder: Path,
    progress: Progress,
    sampling: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Write config, tokenizer and safetensors of the GGUF file `source` into `folder`.

    `sampling` has the defaults of the model card, which such a file does not hold. Keeps a few rows
    in memory at a time. Raises `WeightsError` naming file and tensor, and `OSError`.
    """
    with open_gguf(source) as file:
        dtype = output_dtype(file)
        model = describe(file, dtype)
        files = {"config.json": model.config, **tokenizer_files(file, model.config)}
        files["generation_config.json"] |= sampling
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2)
            (folder / name).write_text(text, encoding="utf-8")
        _write_tensors(file, model, folder / SINGLE_NAME, dtype, progress)


def output_dtype(file: GgufFile) -> str:
    """The type of an unquantized file's matrices, or BF16.

    Raises `WeightsError` for a tensor of an unsupported type.
    """
    for tensor in file.tensors.values():
        if tensor.kind not in SUPPORTED_KINDS:
            raise WeightsError(
                f"Tensor {tensor.name!r} in {file.name} has the type {tensor.kind.name};"
                f" supported are {', '.join(sorted(kind.name for kind in SUPPORTED_KINDS))}."
            )
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return _UNQUANTIZED.get(kinds.pop(), "BF16") if len(kinds) == 1 else "BF16"


def read_values(file: GgufFile, tensor: GgufTensor, dtype: str) -> Array:
    """A whole tensor's values in the type `dtype` (bfloat16 as uint16), in its shape.

    Raises `WeightsError` naming file and tensor for NaN or infinity.
    """
    chunks = [values for values, _ in _convert(file, tensor, dtype)]
    return np.concatenate(chunks).reshape(tensor.shape)


def read_blocks(file: GgufFile, tensor: GgufTensor, dtype: str) -> Array:
    """The bytes of a matrix in blocks, by row. Raises `WeightsError` as `read_values` does."""
    return np.concatenate([rows for rows, _ in _check(file, tensor, dtype)])


def block_format(tensor: GgufTensor) -> str:
    """The block format that a tensor keeps, or an empty string."""
    name = tensor.kind.name.lower()
    return name if len(tensor.shape) == 2 and name in FORMATS else ""


@dataclass(frozen=True, slots=True)
class _Stored:
    """Type and shape of a tensor in the safetensors file."""

    dtype: str
    shape: tuple[int, ...]


def _write_tensors(
    file: GgufFile, model: GgufModel, target: Path, dtype: str, progress: Progress
) -> None:
    sources = {name: file.tensors[source] for name, source in model.tensors.items()}
    progress.start("Converting", sum(tensor.num_bytes for tensor in sources.values()))
    formats = {name: form for name, tensor in sources.items() if (form := block_format(tensor))}

    def chunks_of(name: str) -> Iterator[Array]:
        tensor, order = sources[name], model.row_order(name)
        chunks = (_check if name in formats else _convert)(file, tensor, dtype, order)
        for chunk, num_bytes in chunks:
            yield chunk
            progress.advance(num_bytes)

    stored = {
        name: _Stored("U8", file.rows(tensor).shape)
        if name in formats
        else _Stored(dtype, tensor.shape)
        for name, tensor in sources.items()
    }
    _write_safetensors(target, stored, formats, chunks_of)


def _rows(file: GgufFile, tensor: GgufTensor, row_order: Array | None) -> Iterator[Array]:
    """The tensor's raw rows, a few at a time."""
    rows = file.rows(tensor)
    num_rows = max(1, CHUNK_VALUES * len(rows) // math.prod(tensor.shape))
    for begin in range(0, len(rows), num_rows):
        chosen = slice(begin, begin + num_rows)
        yield rows[chosen] if row_order is None else rows[row_order[chosen]]


def _convert(
    file: GgufFile, tensor: GgufTensor, dtype: str, row_order: Array | None = None
) -> Iterator[tuple[Array, int]]:
    """The tensor's values in their output type, a few rows at a time, with bytes read."""
    for raw in _rows(file, tensor, row_order):
        with np.errstate(all="ignore"):  # damaged scales overflow here and are refused below
            values = _cast(dequantize(raw, tensor.kind), dtype)
        unsigned, exponent = _EXPONENT_BITS[dtype]
        if ((values.view(unsigned) & exponent) == exponent).any():
            raise WeightsError(f"Tensor {tensor.name!r} in {file.name} holds NaN or infinity.")
        yield values, raw.nbytes


def _check(
    file: GgufFile, tensor: GgufTensor, dtype: str, row_order: Array | None = None
) -> Iterator[tuple[Array, int]]:
    """The raw rows, a few at a time, after `_convert` has checked them."""
    raw = _rows(file, tensor, row_order)
    for rows, (_, num_bytes) in zip(raw, _convert(file, tensor, dtype, row_order), strict=True):
        yield rows, num_bytes


def _cast(values: Array, dtype: str) -> Array:
    """float32 values as an array of the output type's bits (bfloat16 as uint16)."""
    if dtype != "BF16":
        return values.astype({"F32": np.float32, "F16": np.float16}[dtype], copy=False)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounding = (bits >> 16) & 1  # to nearest, ties to even
    rounding += 0x7FFF
    rounding += bits
    rounding >>= 16
    return rounding.astype(np.uint16)


def _write_safetensors(
    file: Path,
    tensors: Mapping[str, _Stored],
    formats: Mapping[str, str],
    chunks_of: Callable[[str], Iterable[Array]],
) -> None:
    """Write the tensors; `chunks_of(name)` yields the data of one in order.

    Chunks are arrays whose bytes are the tensor's bytes. Raises `OSError`.
    """
    metadata = {"format": "pt"} | ({"blocks": json.dumps(formats)} if formats else {})
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, tensor in tensors.items():
        end = position + math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        offsets = [position, end]
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for name in tensors:
            for chunk in chunks_of(name):
                stream.write(np.ascontiguousarray(chunk).data)
        assert stream.tell() == 8 + len(raw) + position, "chunks do not add up to their shapes"
