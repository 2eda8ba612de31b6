"""What files of weights hold, told by their SHA-256: the same wherever they lie.

Owns what is remembered of files that were hashed before. Knows no layouts.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from triptych.core.atomic_files import write_whole
from triptych.core.config import ModelOptions
from triptych.core.errors import WeightsError
from triptych.core.weights.cache import WeightsCache
from triptych.core.weights.manifest import sha256_file
from triptych.core.weights.progress import Progress, SilentProgress

_SHA256 = re.compile(rb"[0-9a-f]{64}")
_MAX_THREADS = 8


class FileDigests:
    """SHA-256 of files, each hashed once: it is remembered until the file changes.

    Engines on several hosts compare them, so they are of the content alone. What is remembered
    belongs to a file's place, length and times; a cache that cannot be written to is no error.
    """

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._folder = folder
        self._progress = progress

    @classmethod
    def open(cls, options: ModelOptions, progress: Progress | None = None) -> FileDigests:
        """Those that this machine remembers."""
        return cls(WeightsCache.open(options.cache_dir).digests, progress or SilentProgress())

    def of(self, files: Sequence[Path]) -> list[str]:
        """The digest of each file, hex. Raises `WeightsError` for what cannot be read."""
        try:
            places = [self._place(file) for file in files]
            found = [_remembered(place) for place in places]
            new = [n for n, digest in enumerate(found) if not digest]
            for n, digest in zip(new, self._hash([files[n] for n in new]), strict=True):
                found[n] = digest
                if places[n] == self._place(files[n]):  # it has not changed meanwhile
                    _remember(places[n], digest)
        except OSError as error:
            name = Path(error.filename or "A file of weights").name
            raise WeightsError(f"{name} cannot be read: {error.strerror}.") from error
        return found

    def _hash(self, files: Sequence[Path]) -> list[str]:
        """Several files at a time: one processor hashes slower than most disks read."""
        if not files:
            return []
        sizes = [file.stat().st_size for file in files]
        self._progress.start("Identifying the weights", sum(sizes))
        digests = []
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "triptych-hash") as pool:
            for size, digest in zip(sizes, pool.map(sha256_file, files), strict=True):
                digests.append(digest)
                self._progress.advance(size)
        return digests

    def _place(self, file: Path) -> Path:
        """Where its digest is remembered: another place for a file that was changed."""
        status = file.stat()
        times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
        known = f"{file.resolve()} {status.st_dev} {status.st_ino} {status.st_size} {times}"
        return self._folder / hashlib.sha256(os.fsencode(known)).hexdigest()


def _remembered(place: Path) -> str:
    with suppress(OSError):
        if _SHA256.fullmatch(said := place.read_bytes()):
            return said.decode()
    return ""


def _remember(place: Path, digest: str) -> None:
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, [digest.encode()])
