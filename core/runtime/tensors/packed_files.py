"""Packed weights in files that processes map: one copy in memory for all on a machine.

Owns the format of a file, and the folder: a file for each key, which is complete or absent, is
checked before use, and gives way by use. A key covers everything that decides the content. Files
are for their owner alone and never change: one that is damaged or of another user is not used.
Knows no model.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import shutil
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from tempfile import NamedTemporaryFile

import msgspec
import numpy as np
from filelock import FileLock, Timeout

from triptych.core.block_formats import FORMATS
from triptych.core.ledger import mib
from triptych.core.process.atomic_files import write_whole
from triptych.core.process.huge_pages import has_huge_pages, is_in_huge_pages
from triptych.core.process.logs import fields
from triptych.core.process.mounts import is_in_memory
from triptych.core.process.regular_file import open_regular
from triptych.core.process.typed import decode_msgpack
from triptych.core.runtime.kernels.native.arguments import DTYPES, NativeWeights, PackedWeight
from triptych.core.runtime.kernels.native.library import NativeKernels

Packed = Mapping[int, NativeWeights]
"""The packed weights of projections, by number."""

_MAGIC = b"TRIPACK1"
_HEADER = struct.Struct("<8s32sQ")
"""Magic, SHA-256 of the table, bytes of the table; the table and the weights follow."""
_ALIGNMENT = 64  # of the table's end and of each weight
_CODES = frozenset(DTYPES.values()) | {form.native for form in FORMATS.values()}
_SUFFIX, _LOCK, _PARTIAL = ".weights", ".lock", ".*.partial"
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
_MOST_BYTES = 50 * 2**30  # unless the size is given
_FREE_SHARE = 0.25  # of the disk's free space, at most
_STALE_S = 86_400.0  # after which a partial file has no writer, and a lock no holder
_UNUSED_S = 30 * 86_400.0  # after which a file gives way even where there is room
_WAIT_S = 900.0
_HASH_THREADS = 8
_CHUNK_BYTES = 8 * 2**20
_log = logging.getLogger(__name__)


class _PlacedWeight(msgspec.Struct, frozen=True, array_like=True):
    """A packed weight: its format, and its place behind the table."""

    format: int
    num_outputs: int
    offset: int
    num_bytes: int


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A projection, and the SHA-256 of its weights."""

    number: int
    num_inputs: int
    parts: tuple[_PlacedWeight, ...]
    digest: bytes


class _Table(msgspec.Struct, frozen=True, array_like=True):
    key: str
    entries: tuple[_Entry, ...]


class PackedFiles:
    """Files of at most `max_bytes` together; 0: 50 GiB, or a quarter of the disk's free space.

    Several processes may use a `folder` at once. A file that the system maps in small pages, which
    slow steps down, is copied to memory unless `maps_small_pages`.
    """

    def __init__(
        self,
        folder: Path,
        kernels: NativeKernels,
        *,
        max_bytes: int = 0,
        maps_small_pages: bool = False,
    ) -> None:
        self.kernels = kernels
        self._folder, self._max_bytes = folder, max_bytes
        self._maps_small_pages = maps_small_pages

    def find(self, key: str) -> Packed | None:
        """The weights of a key, mapped or copied; `None` if absent or not to be trusted."""
        found = self._open(key)
        return found if found is None or self._is_kept_mapped(found) else self._copies(found)

    def _open(self, key: str) -> Packed | None:
        """The weights of a key, mapped and checked."""
        path = self._path(key)
        try:
            with open_regular(path) as file:
                found = self._map(file, key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, msgspec.DecodeError) as error:
            _log.warning("packed weights are not used", extra=fields(reason=str(error)))
            return None
        with suppress(OSError):
            os.utime(path)  # the order of use
        return found

    def write(self, key: str, weights: Packed) -> Packed | None:
        """Write weights and map them; `None`, logged, where they cannot be kept or mapped fast.

        The caller has them in memory: they are never copied.
        """
        num_bytes = sum(each.num_bytes for each in weights.values())
        try:
            self._check_folder()
            if not self._make_room(num_bytes):
                _log.info("weights of %s are not shared: the disk has no room", mib(num_bytes))
                return None
            _log.info(
                "%s of packed weights are written to the cache folder, once for all processes"
                " (--no-share-weights: never)",
                mib(num_bytes),
            )
            content = _in_chunks(_content(key, weights))
            write_whole(self._path(key), content, is_durable=False, mode=_PRIVATE_FILE)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            _log.info("weights are not shared", extra=fields(reason=reason))
            return None
        found = self._open(key)
        return found if found is not None and self._is_kept_mapped(found) else None

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Hold the key's lock while weights are packed, so that others wait for them.

        Without a lock where the folder cannot be written, or its holder takes too long.
        """
        lock = FileLock(self._path(key).with_suffix(_LOCK), mode=_PRIVATE_FILE)
        try:
            self._folder.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                _log.info("another process packs these weights; waiting for it")
                lock.acquire(timeout=_WAIT_S)
        except (OSError, Timeout):
            yield
            return
        try:
            yield
        finally:
            lock.release()

    def _is_kept_mapped(self, found: Packed) -> bool:
        """Whether a file that has been read through is mapped as fast as memory."""
        if self._maps_small_pages or not has_huge_pages():
            return True
        first = next(iter(found.values())).parts[0]
        is_fast = is_in_huge_pages(first.address)
        if not is_fast:
            _log.debug("packed weights are copied: the system maps their file in small pages")
        return is_fast

    def _copies(self, found: Packed) -> Packed:
        return {number: self.kernels.copy(weights) for number, weights in found.items()}

    def _path(self, key: str) -> Path:
        return self._folder / (key + _SUFFIX)

    def _check_folder(self) -> None:
        """Raise `OSError` or `ValueError` where a file that is written now would not be used.

        Some file systems map no files, or have no owners and permissions of their own. In memory
        a file that is then copied would take the weights' memory twice.
        """
        if not self._maps_small_pages and is_in_memory(self._folder):
            raise ValueError("the cache folder is in memory (--share-weights: map it)")
        with NamedTemporaryFile(dir=self._folder, prefix=".", suffix=".partial") as file:
            file.write(bytes(_ALIGNMENT))
            file.flush()
            os.fchmod(file.fileno(), _PRIVATE_FILE)
            _check_private(os.fstat(file.fileno()))
            _mapped(file.fileno())

    def _make_room(self, num_bytes: int) -> bool:
        """Remove files unused for long, and more until so many bytes fit; false if they never do.

        Those of other versions of the package are among them: nothing uses them again.
        """
        now = time.time()
        for used_s, _, left in (*self._files(_PARTIAL), *self._files(f"*{_LOCK}")):
            if used_s < now - _STALE_S:
                left.unlink(missing_ok=True)
        used = self._files(f"*{_SUFFIX}")
        kept_bytes = sum(size for _, size, _ in used)
        free_bytes = shutil.disk_usage(self._folder).free + kept_bytes
        most = min(self._max_bytes or min(_MOST_BYTES, int(_FREE_SHARE * free_bytes)), free_bytes)
        if num_bytes > most:
            return False
        for used_s, size, file in used:
            if kept_bytes + num_bytes <= most and used_s > now - _UNUSED_S:
                break
            file.unlink(missing_ok=True)  # processes that have mapped it keep it
            kept_bytes -= size
        return True

    def _files(self, pattern: str) -> list[tuple[float, int, Path]]:
        """Time of use, size and path of files, those unused for longest first."""
        found = []
        for file in self._folder.glob(pattern):
            with suppress(FileNotFoundError):  # another process renamed or removed it
                status = file.stat()
                found.append((status.st_mtime, status.st_size, file))
        return sorted(found)

    def _map(self, file: BufferedReader, key: str) -> Packed:
        """Map a file. Raises `OSError`, or `ValueError` for one that is not whole or not ours."""
        _check_private(os.fstat(file.fileno()))
        table, start = _read_table(file)
        if table.key != key:
            raise ValueError("the file is of another model")
        content = _mapped(file.fileno())[start:]
        for entry in table.entries:
            self._check(entry, len(content))
        found = {
            entry.number: NativeWeights([_part(x, content) for x in entry.parts], entry.num_inputs)
            for entry in table.entries
        }
        if _digests(found) != [entry.digest for entry in table.entries]:
            raise ValueError("the file is damaged")
        return found

    def _check(self, entry: _Entry, num_bytes: int) -> None:
        """Raise `ValueError` for weights that are not within the file, or of another size."""
        for part in entry.parts:
            sizes = part.num_outputs, entry.num_inputs, part.format
            is_known = part.format in _CODES and min(part.num_outputs, entry.num_inputs) > 0
            if not is_known or self.kernels.packed_bytes(*sizes) != part.num_bytes:
                raise ValueError("the file has another layout")
            if part.offset % _ALIGNMENT or not 0 <= part.offset <= num_bytes - part.num_bytes:
                raise ValueError("the file is cut off")


def _content(key: str, weights: Packed) -> Iterator[bytes | memoryview]:
    """The bytes of a file."""
    entries, offset = [], 0
    for (number, each), digest in zip(weights.items(), _digests(weights), strict=True):
        parts = []
        for part in each.parts:
            parts.append(_PlacedWeight(part.format, part.num_outputs, offset, part.num_bytes))
            offset += _aligned(part.num_bytes)
        entries.append(_Entry(number, each.num_inputs, tuple(parts), digest))
    table = msgspec.msgpack.encode(_Table(key, tuple(entries)))
    head = _HEADER.pack(_MAGIC, hashlib.sha256(table).digest(), len(table)) + table
    yield head.ljust(_aligned(len(head)), b"\0")
    for each in weights.values():
        for part in each.parts:
            yield part.content
            yield bytes(_aligned(part.num_bytes) - part.num_bytes)


def _in_chunks(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The same bytes in chunks of whole huge pages, which file systems keep together."""
    chunk, size = memoryview(bytearray(_CHUNK_BYTES)), 0
    for part in parts:
        while len(part):
            taken = min(len(part), _CHUNK_BYTES - size)
            chunk[size : size + taken] = part[:taken]
            part, size = part[taken:], size + taken  # noqa: PLW2901
            if size == _CHUNK_BYTES:
                yield chunk
                size = 0
    yield chunk[:size]


def _read_table(file: BufferedReader) -> tuple[_Table, int]:
    """The table, and where the weights begin. Raises `ValueError` or `msgspec.DecodeError`."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise ValueError("the file is cut off")
    magic, digest, num_bytes = _HEADER.unpack(header)
    size = os.fstat(file.fileno()).st_size
    packed = file.read(num_bytes) if magic == _MAGIC and num_bytes < size else b""
    if hashlib.sha256(packed).digest() != digest:
        raise ValueError("the file is damaged")
    return decode_msgpack(packed, _Table), _aligned(_HEADER.size + num_bytes)


def _check_private(status: os.stat_result) -> None:
    """Raise `ValueError` for a file that is not ours alone."""
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise ValueError("others may write to the file")


def _mapped(descriptor: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of a file, mapped to be read, in huge pages where the file system has them."""
    memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _part(part: _PlacedWeight, content: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> PackedWeight:
    own = content[part.offset : part.offset + part.num_bytes]
    return PackedWeight(own.ctypes.data, part.num_bytes, part.num_outputs, part.format, own)


def _digests(weights: Packed) -> list[bytes]:
    """The SHA-256 of each projection's weights."""
    with ThreadPoolExecutor(min(_HASH_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(_digest, weights.values()))


def _digest(weights: NativeWeights) -> bytes:
    digest = hashlib.sha256()
    for part in weights.parts:
        digest.update(part.content)
    return digest.digest()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
