"""Reading GGUF headers from untrusted files.

Owns parsing the bytes before the tensor data into metadata and tensor infos. Every count is
compared with the remaining bytes before memory is allocated for it, every product is checked, and
tensors may neither overlap nor exceed the file. Knows no model, and of quantization only block
sizes.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from triptych.core.errors import WeightsError
from triptych.core.process.regular_file import open_regular

MAX_METADATA_BYTES = 256 * 2**20
MAX_STRINGS = 4 * 2**20
MAX_NAME_BYTES = 65_535
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32
T = TypeVar("T")
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` with the fastest dimension last, `offset` from the file's beginning."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A mapped file with its checked header. Numeric arrays in `metadata` are numpy copies."""

    name: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    data: memoryview

    def scalar(self, key: str, default: T) -> T:
        """The metadata value of `key`. Raises `WeightsError` if its type is not the default's."""
        value = self.metadata.get(key, default)
        if not isinstance(value, type(default)):
            raise WeightsError(f"{self.name} has an invalid {key}.")
        return value

    def rows(self, tensor: GgufTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The tensor's raw bytes as (rows, bytes per row), mapped; a vector has rows of one."""
        num_rows = math.prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.shape[0]
        raw = self.data[tensor.offset : tensor.offset + tensor.num_bytes]
        return np.frombuffer(raw, np.uint8).reshape(num_rows, -1)


@contextmanager
def open_gguf(path: Path) -> Iterator[GgufFile]:
    """Map `path` and check its header. Raises `WeightsError` naming the file and the problem."""
    try:
        with open_regular(path) as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path.name} cannot be read or is empty.") from error
    # The map closes with its last view, which may outlive this block by a stack frame.
    yield _parse(path.name, memoryview(mapped))


class _Cursor:
    """Reads forward through bytes, never past the end."""

    def __init__(self, name: str, data: memoryview) -> None:
        self.name = name
        self.data = data
        self.position = 0
        self.end = min(len(data), MAX_METADATA_BYTES)
        self.num_strings = 0

    @property
    def left(self) -> int:
        return self.end - self.position

    def fail(self, reason: str) -> WeightsError:
        return WeightsError(f"{self.name} is damaged or truncated: {reason}.")

    def take(self, num_bytes: int, what: str) -> memoryview:
        if num_bytes > self.left:
            raise self.fail(f"{what} needs {num_bytes} bytes, but {self.left} are left")
        self.position += num_bytes
        return self.data[self.position - num_bytes : self.position]

    def uint32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def uint64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, min_item_bytes: int) -> int:
        """Read a count of items, which must all fit into the remaining bytes."""
        count = self.uint64(f"the number of {what}")
        if count > self.left // min_item_bytes:
            raise self.fail(f"{count} {what} do not fit into the {self.left} bytes that are left")
        return count

    def string(self, what: str, max_bytes: int = MAX_METADATA_BYTES) -> str:
        length = self.uint64(f"the length of {what}")
        if length > max_bytes:
            raise self.fail(f"{what} claims {length} bytes")
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error

    def value(self, key: str) -> Any:
        kind = self.uint32(f"the type of {key!r}")
        return self.array(key) if kind == _ARRAY else self.scalar(key, kind)

    def scalar(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        dtype = self._dtype(key, kind)
        return np.frombuffer(self.take(dtype.itemsize, f"the value of {key!r}"), dtype)[0].item()

    def array(self, key: str) -> Any:
        kind = self.uint32(f"the item type of {key!r}")
        if kind == _STRING:
            count = self.count(f"items of {key!r}", 8)
            self.num_strings += count
            if self.num_strings > MAX_STRINGS:
                raise self.fail(f"{key!r} holds more than {MAX_STRINGS} strings")
            return [self.string(f"an item of {key!r}") for _ in range(count)]
        dtype = self._dtype(key, kind)
        count = self.count(f"items of {key!r}", dtype.itemsize)
        raw = self.take(count * dtype.itemsize, f"the items of {key!r}")
        return np.frombuffer(raw, dtype).copy()

    def _dtype(self, key: str, kind: int) -> np.dtype[Any]:
        if kind not in _SCALARS:
            raise self.fail(f"{key!r} has the unknown type {kind}")
        return np.dtype(_SCALARS[kind])


def _parse(name: str, data: memoryview) -> GgufFile:
    cursor = _Cursor(name, data)
    if bytes(cursor.take(4, "the magic")) != b"GGUF":
        raise WeightsError(f"{name} is not a GGUF file.")
    version = cursor.uint32("the version")
    if version not in (2, 3):
        raise WeightsError(f"{name} is GGUF version {version}; versions 2 and 3 are supported.")
    # Smallest tensor info: name length, one dimension, type, offset. Smallest pair: length, type.
    num_tensors = cursor.count("tensors", 8 + 4 + 8 + 4 + 8)
    num_pairs = cursor.count("metadata entries", 8 + 4 + 1)
    metadata = _unique(cursor, num_pairs, "metadata key", _read_pair)
    tensors = _unique(cursor, num_tensors, "tensor", _read_tensor)
    return GgufFile(name, metadata, _place(cursor, metadata, tensors), data)


def _unique(
    cursor: _Cursor, count: int, what: str, read: Callable[[_Cursor], tuple[str, T]]
) -> dict[str, T]:
    entries: dict[str, T] = {}
    for _ in range(count):
        key, value = read(cursor)
        if key in entries:
            raise cursor.fail(f"{what} {key!r} appears twice")
        entries[key] = value
    return entries


def _read_pair(cursor: _Cursor) -> tuple[str, Any]:
    key = cursor.string("a metadata key", MAX_NAME_BYTES)
    return key, cursor.value(key)


def _read_tensor(cursor: _Cursor) -> tuple[str, GgufTensor]:
    """Read one tensor info; its offset is still relative to the start of the data."""
    name = cursor.string("a tensor's name", MAX_NAME_BYTES)
    num_dims = cursor.uint32(f"tensor {name!r}")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions")
    shape = tuple(cursor.uint64(f"the shape of {name!r}") for _ in range(num_dims))[::-1]
    raw_kind = cursor.uint32(f"the type of {name!r}")
    offset = cursor.uint64(f"the offset of {name!r}")
    try:
        kind = GGMLQuantizationType(raw_kind)
    except ValueError as error:
        raise cursor.fail(f"tensor {name!r} has the unknown type {raw_kind}") from error
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if min(shape) == 0 or shape[-1] % block or (block > 1 and num_dims == 1):
        raise cursor.fail(
            f"tensor {name!r} of shape {list(shape)} is not in whole blocks of {block}"
        )
    return name, GgufTensor(name, shape, kind, offset, math.prod(shape) // block * block_bytes)


def _place(
    cursor: _Cursor, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]
) -> dict[str, GgufTensor]:
    """The tensors with offsets from the start of the file, in order, after bounds checks."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        not isinstance(alignment, int)
        or not 1 <= alignment <= MAX_ALIGNMENT
        or alignment.bit_count() != 1
    ):
        raise cursor.fail(f"the alignment {alignment!r} is not a power of two")
    start = -(-cursor.position // alignment) * alignment
    position, size = start, len(cursor.data)
    placed = {}
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        offset = start + tensor.offset
        if tensor.offset % alignment:
            raise cursor.fail(f"tensor {tensor.name!r} is not aligned")
        if offset < position:
            raise cursor.fail(f"tensor {tensor.name!r} overlaps another")
        if offset + tensor.num_bytes > size:
            raise cursor.fail(
                f"tensor {tensor.name!r} ends at byte {offset + tensor.num_bytes} of {size}"
            )
        position = offset + tensor.num_bytes
        placed[tensor.name] = replace(tensor, offset=offset)
    return placed
