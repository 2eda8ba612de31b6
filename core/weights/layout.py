"""Tensor infos of a safetensors folder, validated from its headers before any file is mapped.

Owns finding the weight files of a folder and validating their headers: sizes, types, shapes, full
coverage without holes or overlaps, and agreement with the shard index. Never reads tensor data and
knows no torch. Messages name files by their last path component only.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from triptych.core.block_formats import FORMATS
from triptych.core.errors import WeightsError
from triptych.core.process.regular_file import open_regular, read_regular
from triptych.core.process.typed import convert, decode_json

MAX_HEADER_BYTES = 100_000_000
MAX_JSON_BYTES = 32_000_000
MAX_DIMS = 8
SINGLE_NAME = "model.safetensors"
STEMS = ("model", "diffusion_pytorch_model")
"""Stems of checkpoint files in transformers and diffusers."""
UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8, "I64": 8, "U64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


class TensorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor as its header describes it. `dtype` is the safetensors name, `file` its file.

    A matrix in blocks of integers has a `format` (see `core.block_formats`): its `shape` is that of
    its values, its file holds the bytes of its rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    format: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data."""
        if self.format:
            return self.shape[0] * FORMATS[self.format].row_bytes(self.shape[1])
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class _HeaderEntry(msgspec.Struct):
    """One header entry, as the format defines it. Defaults let `__metadata__` decode as one.

    Converted files list in `__metadata__` the matrices in blocks: {name: format} as JSON.
    """

    dtype: str = ""
    shape: list[int] | None = None
    data_offsets: tuple[int, int] = (0, 0)
    blocks: str = ""


class _Index(msgspec.Struct):
    """The shard index: the file of each tensor."""

    weight_map: dict[str, str]


def read_layout(folder: Path) -> dict[str, TensorInfo]:
    """Tensor infos by name of the (single or sharded) checkpoint in `folder`.

    Raises `WeightsError` naming file and tensor if headers, index and file sizes disagree.
    """
    index = _find_index(folder)
    if index is None:
        return read_header(single_file(folder))
    weight_map = _read_index(index)
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        for name, info in read_header(folder / shard).items():
            if name in tensors:
                raise WeightsError(
                    f"Tensor {name!r} is in two shards, {tensors[name].file} and {shard}."
                )
            tensors[name] = info
    _compare_with_index(tensors, weight_map, index.name)
    return tensors


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The checkpoint's safetensors files, in order of name."""
    index = _find_index(folder)
    if index is None:
        return (single_file(folder),)
    return tuple(folder / shard for shard in sorted(set(_read_index(index).values())))


def stored_bytes(folder: Path) -> int:
    """The size of a folder's safetensors files; 0 where there are none."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def check_entries(folder: Path) -> None:
    """Raise `WeightsError` for a folder that holds anything except files and folders.

    Libraries would block on such an entry, or read it endlessly.
    """
    for entry in sorted((*folder.glob("*"), *folder.glob("*/*"))):
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise WeightsError(f"{entry.name} cannot be read: it is not a regular file.")


def single_file(folder: Path) -> Path:
    """The safetensors file of a folder without shard index: the only one, or the standard name."""
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        if file.stem in STEMS or len(files) == 1:
            return file
    if files:
        raise WeightsError(
            f"Found {len(files)} safetensors files such as {files[0].name}, but no"
            f" {SINGLE_NAME}.index.json that lists their tensors."
        )
    unsafe = sorted(file for file in folder.glob("*") if file.suffix in UNSAFE_SUFFIXES)
    if unsafe:
        raise WeightsError(
            f"{unsafe[0].name} has an unsafe format: such files can run code when loaded."
            " Convert the model to safetensors."
        )
    raise WeightsError(f"No {SINGLE_NAME} or {SINGLE_NAME}.index.json in the model's folder.")


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Tensor infos of one safetensors file, after checking that they cover its data exactly."""
    raw, data_bytes = _read_raw_header(file)
    try:
        # Typed decoding keeps a malicious header from growing to many times its size. The last of
        # duplicate names wins, as in the library, and the coverage check finds the hole.
        entries = decode_json(raw, dict[str, _HeaderEntry])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"{file.name} has a damaged header: {brief(error)}.") from error
    metadata = entries.pop("__metadata__", _HeaderEntry())
    for name, entry in entries.items():
        _check_entry(file.name, name, entry)
    _check_coverage(file.name, entries, data_bytes)
    tensors = {
        name: TensorInfo(name, tuple(entry.shape or ()), entry.dtype, file.name)
        for name, entry in entries.items()
    }
    return tensors | _in_blocks(file.name, tensors, metadata.blocks)


def _in_blocks(file: str, tensors: Mapping[str, TensorInfo], blocks: str) -> dict[str, TensorInfo]:
    """Infos of the tensors stored in blocks, from the `blocks` metadata."""
    try:
        formats = decode_json(blocks.encode(), dict[str, str]) if blocks else {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise WeightsError(f"{file} has a damaged header: {brief(error)}.") from error
    found = {}
    for name, format_name in formats.items():
        info, form = tensors.get(name), FORMATS.get(format_name)
        is_matrix = info is not None and info.dtype == "U8" and len(info.shape) == 2
        if info is None or form is None or not is_matrix or info.shape[1] % form.num_bytes:
            raise WeightsError(f"Tensor {name!r} in {file} does not match its block format.")
        num_inputs = info.shape[1] // form.num_bytes * form.num_inputs
        shape = (info.shape[0], num_inputs)
        found[name] = TensorInfo(name, shape, info.dtype, file, format_name)
    return found


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a model's folder. Raises `WeightsError` naming the file."""
    try:
        value = json.loads(read_regular(file, MAX_JSON_BYTES), object_pairs_hook=_unique)
    except OSError as error:
        raise WeightsError(f"{file.name} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file.name} is damaged: {brief(error)}.") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{file.name} is damaged: it is not a JSON object.")
    return value


def read_json_if_there(file: Path) -> dict[str, Any]:
    """Like `read_json`; empty if the file does not exist."""
    return read_json(file) if file.exists() else {}


def count_field(config: Mapping[str, Any], name: str) -> int:
    """The required config.json field `name`, a whole number above 0. Raises `WeightsError`."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WeightsError(f"config.json: {name} must be a whole number above 0.")
    return value


def _read_raw_header(file: Path) -> tuple[bytes, int]:
    """The header's JSON bytes and the number of data bytes behind it."""
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise WeightsError(f"{file.name} is truncated: {size} bytes hold no header.")
            length = int.from_bytes(prefix, "little")
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise WeightsError(
                    f"{file.name} is damaged or truncated: its header claims {length} bytes"
                    f" of {size}."
                )
            return stream.read(length), size - 8 - length
    except FileNotFoundError as error:
        raise WeightsError(f"{file.name} is missing.") from error
    except OSError as error:
        raise WeightsError(f"{file.name} cannot be read: {error.strerror}.") from error


def _check_entry(file: str, name: str, entry: _HeaderEntry) -> None:
    item_bytes = DTYPE_BYTES.get(entry.dtype)
    if item_bytes is None:
        raise WeightsError(f"Tensor {name!r} in {file} has the unsupported type {entry.dtype!r}.")
    shape = entry.shape
    if shape is None or len(shape) > MAX_DIMS or any(not 0 <= dim < 2**63 for dim in shape):
        raise WeightsError(f"Tensor {name!r} in {file} has an impossible shape.")
    begin, end = entry.data_offsets
    if end - begin != math.prod(shape) * item_bytes:
        raise WeightsError(
            f"Tensor {name!r} in {file} has {end - begin} bytes, but shape {shape} of"
            f" {entry.dtype} needs {math.prod(shape) * item_bytes}."
        )


def _check_coverage(file: str, entries: dict[str, _HeaderEntry], data_bytes: int) -> None:
    """Check that offsets tile the data: no hole, no overlap, no excess, no remainder."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin != position:
            kind = "overlaps another" if begin < position else "leaves a hole before it"
            raise WeightsError(f"Tensor {name!r} in {file} {kind} at byte {begin}.")
        if end > data_bytes:
            raise WeightsError(
                f"{file} is truncated: tensor {name!r} ends at byte {end} of {data_bytes}."
            )
        position = end
    if position != data_bytes:
        raise WeightsError(f"{file} has {data_bytes - position} bytes that belong to no tensor.")


def _find_index(folder: Path) -> Path | None:
    """The shard index; a variant's (`model.safetensors.index.fp16.json`) if it is the only one."""
    for stem in STEMS:
        if (index := folder / f"{stem}.safetensors.index.json").is_file():
            return index
    if any((folder / f"{stem}.safetensors").is_file() for stem in STEMS):
        return None
    return next((file for stem in STEMS for file in folder.glob(f"{stem}.*.index.*.json")), None)


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = convert(read_json(index), _Index).weight_map
    except msgspec.ValidationError as error:
        raise WeightsError(f"{index.name} is damaged: {brief(error)}.") from error
    if not weight_map:
        raise WeightsError(f"{index.name} lists no tensors.")
    for name, shard in weight_map.items():
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise WeightsError(f"{index.name} places tensor {name!r} in an invalid file.")
        if not (index.parent / shard).is_file():
            raise WeightsError(f"Shard {shard} is missing; it should hold tensor {name!r}.")
    return weight_map


def _compare_with_index(
    tensors: Mapping[str, TensorInfo], weight_map: Mapping[str, str], index: str
) -> None:
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file != shard:
            raise WeightsError(f"Tensor {name!r} is listed in {index}, but not in {shard}.")
    for name, info in tensors.items():
        if name not in weight_map:
            raise WeightsError(f"Tensor {name!r} in {info.file} is not listed in {index}.")


_SPECIAL = "__float__"
"""The only key of an object by which transformers writes a number that JSON has not."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any] | float:
    """A JSON object, or infinity; raises `ValueError` for duplicate keys."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key appears twice")
    return float(str(fields[_SPECIAL])) if fields.keys() == {_SPECIAL} else fields


def brief(error: BaseException) -> str:
    """The error in one short line, safe to show."""
    lines = str(error).strip().splitlines()
    return lines[0][:120].rstrip(".: ") if lines else type(error).__name__
