"""Pages on disk, which outlive the process.

Owns the files: one for each page, named by its key, in a folder for each format of pages. A file is
complete or absent, since it is written next to its place and renamed. It is not flushed to the
device: its header has a SHA-256 digest of format, key and content, so a page that a power cut or
anything else has damaged is refused, and computed again. The index is rebuilt from names and sizes
when the folder is opened; one process at a time may have it open.

Pages hold prompts in a readable form: folder and files are for their owner alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from triptych.core.errors import ConfigError
from triptych.core.kv.tiers.order import PageOrder
from triptych.core.kv.transfer.messages import PageFormat
from triptych.core.process.atomic_files import remove_partial, write_whole

_MAGIC = b"TRIPAGE1"
_HEADER = struct.Struct("<8s32s32sQ32s")
"""Magic, digest of the format, key, bytes of content, digest of these and the content."""
_NAME = re.compile(r"[0-9a-f]{64}")
_PREFIXES = tuple(f"{n:02x}" for n in range(256))
_GIB = 2**30
_MOST_BYTES = 50 * _GIB  # unless the size is given
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600


class DiskTier:
    """At most a `share` of `max_bytes` of page files of one format, below `folder`.

    With 0 bytes the free space decides. Raises `ConfigError` if the folder cannot be used. All
    other methods are called on one thread.
    """

    def __init__(
        self, folder: Path, page_format: PageFormat, max_bytes: int, share: float = 1.0
    ) -> None:
        self._format = hashlib.sha256(msgspec.msgpack.encode(page_format)).digest()
        self._content_bytes = page_format.page_bytes
        self.page_bytes = _HEADER.size + self._content_bytes
        self.order = PageOrder()
        self._folder = folder / self._format.hex()[:32]
        try:
            self._lock = self._open(folder)
            with ExitStack() as on_error:
                on_error.callback(self.close)
                found = sorted(self._scan())
                self.num_pages = self._size(folder, max_bytes, share, len(found)) // self.page_bytes
                self._index(found)
                on_error.pop_all()
        except OSError as error:
            raise ConfigError(
                f"disk_offload_dir {folder}: {error.strerror or error}; name a folder that this"
                " user may write to."
            ) from error

    @property
    def num_bytes(self) -> int:
        """The bytes of all page files, with their headers."""
        return len(self.order) * self.page_bytes

    @property
    def is_full(self) -> bool:
        """Whether a page has to give way to the next one."""
        return len(self.order) >= self.num_pages

    def write(self, key: bytes, content: memoryview) -> None:
        """Write a page that is not here. Raises `OSError`."""
        head = self._head(key)
        header = _HEADER.pack(*head, _digest(head, content))
        write_whole(self._path(key), (header, content), is_durable=False, mode=_PRIVATE_FILE)
        self.order.add(key, 0)

    def read(self, key: bytes, content: memoryview) -> bool:
        """Fill `content` with a page; false, and the page is gone, if it is missing or damaged."""
        path = self._path(key)
        with suppress(OSError):
            if self._read(path, key, content):
                os.utime(path)  # the order of use after a restart
                return True
        self.drop(key)
        return False

    def drop(self, key: bytes) -> None:
        """Remove a page, if it is here."""
        if self.order.drop(key) is not None:
            with suppress(OSError):
                self._path(key).unlink(missing_ok=True)

    def close(self) -> None:
        """Let another process open the folder."""
        os.close(self._lock)

    def _head(self, key: bytes) -> tuple[bytes, bytes, bytes, int]:
        return _MAGIC, self._format, key, self._content_bytes

    def _read(self, path: Path, key: bytes, content: memoryview) -> bool:
        """Whether the file holds just this page."""
        header = bytearray(_HEADER.size)
        with path.open("rb", buffering=0) as file:
            if file.readinto(header) != _HEADER.size or file.readinto(content) != len(content):
                return False
        *head, digest = _HEADER.unpack(header)
        return tuple(head) == self._head(key) and digest == _digest(self._head(key), content)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / name

    def _open(self, folder: Path) -> int:
        """Make the folders and lock theirs. Raises `OSError` or `ConfigError`."""
        folder.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
        self._folder.mkdir(mode=_PRIVATE_FOLDER, exist_ok=True)
        for prefix in _PREFIXES:
            (self._folder / prefix).mkdir(mode=_PRIVATE_FOLDER, exist_ok=True)
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE_FILE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise ConfigError(
                f"disk_offload_dir {folder}: another server has pages of this model open there;"
                " give each server its own folder."
            ) from error
        return lock

    def _size(self, folder: Path, max_bytes: int, share: float, num_found: int) -> int:
        """The bytes that files may take. Raises `ConfigError` if there is no room for so many."""
        own_bytes = num_found * self.page_bytes
        free_bytes = shutil.disk_usage(folder).free + own_bytes
        if max_bytes > free_bytes:
            raise ConfigError(
                f"disk_offload_max_gb: {max_bytes / _GIB:.1f} GiB are wanted in {folder}, and"
                f" {free_bytes / _GIB:.1f} are free there."
            )
        chosen = min(share * _MOST_BYTES, max(own_bytes, share * free_bytes // 2))
        return int(share * max_bytes or chosen)

    def _index(self, found: Sequence[tuple[int, bytes]]) -> None:
        """Take over the pages of earlier processes; those used last give way last."""
        for number, (_, key) in enumerate(found):
            self.order.add(key, 0)
            if len(found) - number > self.num_pages:
                self.drop(key)

    def _scan(self) -> Iterator[tuple[int, bytes]]:
        """The time of use and key of each page; files that are no page of this size are removed."""
        for prefix in _PREFIXES:
            remove_partial(self._folder / prefix)
            with os.scandir(self._folder / prefix) as entries:
                for entry in entries:
                    if not _NAME.fullmatch(entry.name):
                        continue
                    found = entry.stat(follow_symlinks=False)
                    if found.st_size == self.page_bytes:
                        yield found.st_mtime_ns, bytes.fromhex(entry.name)
                    else:
                        os.unlink(entry.path)


def _digest(head: tuple[bytes, bytes, bytes, int], content: memoryview) -> bytes:
    found = hashlib.sha256(msgspec.msgpack.encode(head))
    found.update(content)
    return found.digest()
