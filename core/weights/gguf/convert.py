"""Converting a GGUF file into a folder of safetensors, configs and tokenizer files.

Owns the data path: read a few rows, undo what llama.cpp's converter did, append. Matrices in blocks
of four bits or more are kept (see `core.block_formats`), all else in such a file becomes bfloat16;
unquantized files keep their type. `describe` maps names and configurations, `tokenizer` builds the
tokenizer. The `gguf` library dequantizes; of kept blocks only to check for NaN and infinity. No
data reaches it before `header` has checked all bounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from triptych.core.block_formats import FORMATS, BlockFormat
from triptych.core.errors import WeightsError
from triptych.core.weights.gguf.describe import GgufModel, describe
from triptych.core.weights.gguf.header import GgufFile, GgufTensor, open_gguf
from triptych.core.weights.gguf.layouts import Array, GgufTarget
from triptych.core.weights.gguf.tokenizer import tokenizer_files
from triptych.core.weights.layout import DTYPE_BYTES, SINGLE_NAME
from triptych.core.weights.progress import Progress

KEPT_KINDS = frozenset({Kind.F32, Kind.F16, Kind.BF16} | {Kind[name.upper()] for name in FORMATS})
UNPACKED_KINDS = frozenset({
    Kind.Q2_K, Kind.Q3_K, Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S,
    Kind.IQ3_XXS, Kind.IQ3_S, Kind.TQ1_0, Kind.TQ2_0,
})  # fmt: skip
SUPPORTED_KINDS = KEPT_KINDS | UNPACKED_KINDS
CHUNK_VALUES = 1 << 21
_UNQUANTIZED = {Kind.F32: "F32", Kind.F16: "F16"}
_EXPONENT_BITS = {
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}


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
    chunks = [values for values, _ in _values(file, GgufTarget((tensor,), tensor.shape), dtype)]
    return np.concatenate(chunks).reshape(tensor.shape)


def read_blocks(file: GgufFile, tensor: GgufTensor, dtype: str) -> Array:
    """The bytes of a matrix in blocks, by row. Raises `WeightsError` as `read_values` does."""
    target = GgufTarget((tensor,), tensor.shape)
    return np.concatenate([rows for rows, _ in _blocks(file, target, dtype)])


def block_format(target: GgufTensor | GgufTarget) -> str:
    """The block format that a tensor keeps, or an empty string."""
    if isinstance(target, GgufTensor):
        target = GgufTarget((target,), target.shape)
    name = target.sources[0].kind.name.lower()
    is_alike = len({source.kind for source in target.sources}) == 1
    is_changed = target.change is not None or target.whole is not None
    form = FORMATS.get(name)
    if form is None or is_changed or not is_alike or len(target.shape) != 2:
        return ""
    has_whole_blocks = target.inputs is None or _block_order(target.inputs, form) is not None
    return name if has_whole_blocks else ""


def _block_order(inputs: Array, form: BlockFormat) -> Array | None:
    """The order of blocks that is this order of inputs, if there is one."""
    blocks = inputs.reshape(-1, form.num_inputs)
    first = blocks[:, :1]
    is_whole = (first % form.num_inputs == 0).all() and (
        blocks - first == np.arange(form.num_inputs)
    ).all()
    order: Array = first[:, 0] // form.num_inputs
    return order if is_whole else None


@dataclass(frozen=True, slots=True)
class _Stored:
    """Type and shape of a tensor in the safetensors file."""

    dtype: str
    shape: tuple[int, ...]


def _write_tensors(
    file: GgufFile, model: GgufModel, target: Path, dtype: str, progress: Progress
) -> None:
    targets = model.tensors
    total = sum(source.num_bytes for each in targets.values() for source in each.sources)
    progress.start("Converting", total)
    formats = {name: form for name, each in targets.items() if (form := block_format(each))}

    def chunks_of(name: str) -> Iterator[Array]:
        each = targets[name]
        read = _blocks if name in formats else _values
        for chunk, num_bytes in read(file, each, "F32" if each.is_exact else dtype):
            yield chunk
            progress.advance(num_bytes)

    stored = {
        name: _Stored("U8", (each.shape[0], FORMATS[formats[name]].row_bytes(each.shape[1])))
        if name in formats
        else _Stored("F32" if each.is_exact else dtype, each.shape)
        for name, each in targets.items()
    }
    _write_safetensors(target, stored, formats, chunks_of)


def _values(file: GgufFile, target: GgufTarget, dtype: str) -> Iterator[tuple[Array, int]]:
    """The values in their output type, a few rows at a time, with bytes read.

    Raises `WeightsError` naming file and tensor for NaN or infinity.
    """
    for values, num_bytes in _whole(file, target) if target.whole else _float_rows(file, target):
        with np.errstate(all="ignore"):  # values out of range are refused below
            cast = _cast(values, dtype)
        unsigned, exponent = _EXPONENT_BITS[dtype]
        if ((cast.view(unsigned) & exponent) == exponent).any():
            name = target.sources[0].name
            raise WeightsError(f"Tensor {name!r} in {file.name} holds NaN or infinity.")
        yield cast, num_bytes


def _blocks(file: GgufFile, target: GgufTarget, dtype: str) -> Iterator[tuple[Array, int]]:
    """The raw rows, a few at a time, after `_values` has checked them."""
    form = FORMATS[target.sources[0].kind.name.lower()]
    order = None if target.inputs is None else _block_order(target.inputs, form)
    for parts, (_, num_bytes) in zip(
        _row_parts(file, target), _values(file, target, dtype), strict=True
    ):
        rows = np.concatenate([raw for raw, _ in parts])
        if order is not None:
            blocks = rows.reshape(len(rows), -1, form.num_bytes)
            rows = blocks[:, order].reshape(len(rows), -1)
        yield rows, num_bytes


def _float_rows(file: GgufFile, target: GgufTarget) -> Iterator[tuple[Array, int]]:
    """Float values of the target's rows, a few at a time, with bytes read."""
    for parts in _row_parts(file, target):
        with np.errstate(all="ignore"):  # damaged scales overflow here and are refused later
            values = np.concatenate([dequantize(raw, kind) for raw, kind in parts])
            if target.inputs is not None:
                values = values[:, target.inputs]
            if target.change is not None:
                values = target.change(values)
        yield values, sum(raw.nbytes for raw, _ in parts)


def _whole(file: GgufFile, target: GgufTarget) -> Iterator[tuple[Array, int]]:
    """Float values made from all sources at once."""
    assert target.whole is not None
    arrays = [dequantize(file.rows(each), each.kind).reshape(each.shape) for each in target.sources]
    yield target.whole(arrays), sum(source.num_bytes for source in target.sources)


def _row_parts(file: GgufFile, target: GgufTarget) -> Iterator[list[tuple[Array, Kind]]]:
    """The target's raw rows, a few at a time: those of each source with their type, in order."""
    sources = [(file.rows(each), each.kind) for each in target.sources]
    ends = np.cumsum([len(rows) for rows, _ in sources])
    order = range(int(ends[-1])) if target.rows is None else target.rows
    values_per_row = math.prod(target.shape) // len(order)
    step = max(1, CHUNK_VALUES // values_per_row)
    for begin in range(0, len(order), step):
        yield list(_pick(sources, ends, order[begin : begin + step]))


def _pick(
    sources: Sequence[tuple[Array, Kind]], ends: Array, numbers: Array | range
) -> Iterator[tuple[Array, Kind]]:
    """The rows of these numbers, as runs of rows of one source."""
    if len(sources) == 1:
        ((rows, kind),) = sources
        chosen = slice(numbers.start, numbers.stop) if isinstance(numbers, range) else numbers
        yield rows[chosen], kind
        return
    places = np.searchsorted(ends, numbers, side="right")
    cuts = np.flatnonzero(np.diff(places)) + 1
    for run in np.split(np.asarray(numbers), cuts):
        which = int(np.searchsorted(ends, run[0], side="right"))
        rows, kind = sources[which]
        yield rows[run - (ends[which] - len(rows))], kind


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
