"""Reading files that `torch.save` wrote, without an unpickler.

Owns the archive: its records, their places, and the check that every tensor stays within its
storage. `tensor_pickle` knows the meaning of the records; the caller, that of their tensors.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import torch

from triptych.core.errors import WeightsError
from triptych.core.runtime.tensors.tensor_pickle import (
    MAX_BYTES,
    StorageRef,
    UnsafePickle,
    read_pickle,
)

_DESCRIPTION = "/data.pkl"
_HEADER_BYTES = 30  # of a record, before its name
_ENCRYPTED = 1
_MAX_EMPTY = 2**60
"""Limit of the product of the other sizes of a tensor without elements, which torch multiplies."""
_MAX_SHARING = 8
"""Limit of the bytes of all views, as a multiple of those of the storages."""


def read_torch_file(file: Path) -> Any:
    """Read a .pt or .pth file: numbers, strings, and tensors on the CPU, in dictionaries.

    Raises `WeightsError` for a file that is damaged or holds anything else.
    """
    try:
        with file.open("rb") as stream:
            if not zipfile.is_zipfile(stream):
                raise UnsafePickle(
                    "it is not an archive, as torch.save writes since version 1.6; load it"
                    " elsewhere and save it again"
                )
            with zipfile.ZipFile(stream) as archive:
                return _Archive(archive, file.stat().st_size).read()
    except UnsafePickle as error:
        raise WeightsError(f"{file.name} cannot be read: {error}.") from error
    except (zipfile.BadZipFile, OSError, NotImplementedError, EOFError, ValueError) as error:
        raise WeightsError(f"{file.name} cannot be read: it is damaged.") from error


class _Archive:
    """The records of one file."""

    def __init__(self, archive: zipfile.ZipFile, num_bytes: int) -> None:
        self._archive = archive
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
        self._records = {record.filename: record for record in records}
        if len(self._records) != len(records):
            raise UnsafePickle("two records in it have one name")
        ends = (*(record.header_offset for record in records[1:]), num_bytes)
        for record, end in zip(records, ends, strict=True):
            _check_record(record, end)
        self._storages: dict[str, tuple[StorageRef, torch.Tensor]] = {}
        self._num_left = _MAX_SHARING * num_bytes

    def read(self) -> Any:
        """The described object, with tensors over the other records."""
        found = [name for name in self._records if name.endswith(_DESCRIPTION)]
        if len(found) != 1:
            raise UnsafePickle("it has no description of tensors")
        self._root = found[0].removesuffix(_DESCRIPTION)
        order = self._records.get(f"{self._root}/byteorder")
        if order is not None and self._bytes(order, 16) != b"little":
            raise UnsafePickle("its numbers are big-endian")
        data = self._bytes(self._records[found[0]], MAX_BYTES)
        return read_pickle(data, self._rebuild, torch.Tensor)

    def _bytes(self, record: zipfile.ZipInfo, most: int) -> bytes:
        if record.file_size > most:
            raise UnsafePickle(f"its {record.filename.rpartition('/')[2]!a} is too large")
        return self._archive.read(record)

    def _rebuild(
        self, storage: StorageRef, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        """Make a tensor over a storage; implements `tensor_pickle.Rebuild`."""
        values = self._storage(storage)
        num_elements, last = 1, offset
        for count, step in zip(size, stride, strict=True):
            num_elements *= count
            last += (count - 1) * step
        if not num_elements:
            if math.prod(filter(None, size)) > _MAX_EMPTY:
                raise UnsafePickle("a tensor in it has an invalid shape")
            return torch.empty(0, dtype=values.dtype).as_strided(size, stride)
        if offset < 0 or last >= len(values) or num_elements > len(values):
            raise UnsafePickle("a tensor in it exceeds its storage")
        self._num_left -= num_elements * values.itemsize
        if self._num_left < 0:
            raise UnsafePickle("its tensors are many times as large as the file")
        return values.as_strided(size, stride, offset)

    def _storage(self, storage: StorageRef) -> torch.Tensor:
        """All elements of a storage, read once."""
        if storage.key in self._storages:
            known, values = self._storages[storage.key]
            if known != storage:
                raise UnsafePickle("it describes one storage in two ways")
            return values
        record = self._records.get(f"{self._root}/data/{storage.key}")
        dtype: torch.dtype = getattr(torch, storage.dtype)
        if record is None or record.file_size != storage.num_elements * dtype.itemsize:
            raise UnsafePickle("a storage in it has another size than it says")
        values = _elements(self._archive.read(record), dtype)
        self._storages[storage.key] = storage, values
        return values


def _check_record(record: zipfile.ZipInfo, end: int) -> None:
    """Check that a record is stored uncompressed, between its own header and `end`."""
    if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & _ENCRYPTED:
        raise UnsafePickle("a record in it is compressed or encrypted")
    name_bytes = len(record.orig_filename.encode())
    is_whole = record.file_size == record.compress_size
    if not is_whole or record.header_offset + _HEADER_BYTES + name_bytes + record.file_size > end:
        raise UnsafePickle("its records overlap")


def _elements(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=dtype)
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if dtype is torch.bool and bool((values > 1).any()):
        raise UnsafePickle("a boolean in it is neither 0 nor 1")
    return values.view(dtype)
