"""Converted weights on disk: content-addressed, sealed, and never trusted unverified.

Owns the cache folder: one entry per key, built beside its place and renamed into it under a lock,
quarantined when it no longer matches its seal. A disk that is full or read-only turns the cache
off for that model: it is built in a temporary folder that goes when the process ends.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from triptych.core.errors import WeightsError
from triptych.core.weights.manifest import Manifest, flush, read_manifest, seal, verify
from triptych.core.weights.progress import Progress

Build = Callable[[Path], None]
"""Fills an empty folder."""

LOCK_TIMEOUT_S = 900.0
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
_KEY = re.compile(r"[0-9a-f]{64}")
_QUARANTINED, _PARTIAL = ".corrupt", ".partial"
_log = logging.getLogger(__name__)


class WeightsCache:
    """Entries under `root`/models. All methods may be called by several processes at once."""

    def __init__(self, root: Path) -> None:
        self.models = root / "models"
        self.locks = root / "locks"

    @classmethod
    def open(cls, cache_dir: str) -> WeightsCache:
        """The cache in `cache_dir`, or in the user's cache folder when empty."""
        return cls(Path(cache_dir).expanduser() if cache_dir else default_cache_dir())

    def get(self, key: str, source: str, build: Build, progress: Progress) -> tuple[Path, str]:
        """The verified folder of `key` and its digest, built when absent and rebuilt when damaged.

        `source` is the reference to remember. Raises what `build` raises, except that a full or
        read-only disk sends it to a temporary folder.
        """
        try:
            with self._locked(key):
                folder = self.models / key
                manifest = self._verified(key, progress) or self._build(key, source, build)
                return folder, manifest.digest
        except OSError as error:
            if error.errno not in _NO_ROOM and not isinstance(error, Timeout):
                raise
            _log.warning(
                "The weights cache is off for this run: %s.", error.strerror or "its lock is held"
            )
            return _build_temporarily(key, source, build)

    def entries(self) -> list[tuple[Path, Manifest | None]]:
        """Every folder in the cache; manifest `None`: quarantined or unreadable."""
        if not self.models.is_dir():
            return []
        return [(folder, _manifest_or_none(folder)) for folder in sorted(self.models.iterdir())]

    def remove(self, folder: Path) -> None:
        """Delete an entry."""
        assert folder.parent == self.models
        shutil.rmtree(folder)

    def _locked(self, key: str) -> FileLock:
        """The entry's lock: the operating system's, so a dead holder's lock is free."""
        assert _KEY.fullmatch(key)
        self.locks.mkdir(parents=True, exist_ok=True)
        self.models.mkdir(parents=True, exist_ok=True)
        return FileLock(self.locks / f"{key}.lock", timeout=LOCK_TIMEOUT_S)

    def _verified(self, key: str, progress: Progress) -> Manifest | None:
        folder = self.models / key
        if not folder.exists():
            return None
        try:
            manifest = verify(folder, progress)
            if manifest.key != key:
                raise WeightsError("The manifest is another entry's.")
        except WeightsError as error:
            _log.warning("Cached weights are damaged and will be rebuilt. %s", error.message)
            _replace(folder, self.models / (key + _QUARANTINED))
            return None
        return manifest

    def _build(self, key: str, source: str, build: Build) -> Manifest:
        partial = self.models / (key + _PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)  # a crashed builder's
        try:
            partial.mkdir()
            build(partial)
            manifest = seal(partial, key, source)
            partial.rename(self.models / key)
            flush(self.models)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return manifest


def default_cache_dir() -> Path:
    """The platform's folder for caches, as the XDG specification, macOS and Windows have it."""
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "triptych"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local")) / "triptych"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "triptych"


def _manifest_or_none(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder) if _KEY.fullmatch(folder.name) else None
    except WeightsError:
        return None


def _replace(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    source.rename(target)


def _build_temporarily(key: str, source: str, build: Build) -> tuple[Path, str]:
    """Build in the system's temporary folder, or else in memory; deleted at exit."""
    for parent in dict.fromkeys((Path(tempfile.gettempdir()), Path("/dev/shm"))):  # noqa: S108
        if not parent.is_dir():
            continue
        folder = Path(tempfile.mkdtemp(prefix="triptych-weights-", dir=parent))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        try:
            build(folder)
            return folder, seal(folder, key, source).digest
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            if error.errno not in _NO_ROOM:
                raise
    raise WeightsError(
        "There is no room for the converted weights: free some disk space, or set --cache-dir to"
        " a larger disk."
    )
