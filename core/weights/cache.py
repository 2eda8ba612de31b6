"""Converted weights on disk: content-addressed, sealed, and verified before use.

Owns the cache folder: one entry per key, built in a partial folder and renamed into place under a
lock, quarantined when it no longer matches its seal. A full or read-only disk turns the cache off
for that model: it is built in a temporary folder that is deleted when the process ends.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.process.logs import fields
from triptych.core.process.lookups import record_miss
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
    """Entries under `root`/models. All methods may be called by several processes at once.

    `kernels`, `packed`, `triton`, `bundles` and `facts` are folders of other modules.
    """

    def __init__(self, root: Path) -> None:
        self.models = root / "models"
        self.locks = root / "locks"
        self.kernels = root / "kernels"
        self.packed = root / "packed"
        self.triton = root / "triton"
        self.bundles = root / "bundles"
        self.facts = root / "facts"

    @classmethod
    def open(cls, cache_dir: str) -> WeightsCache:
        """The cache in `cache_dir`, or in the user's cache folder when empty."""
        return cls(Path(cache_dir).expanduser() if cache_dir else default_cache_dir())

    def get(self, key: str, source: str, build: Build, progress: Progress) -> tuple[Path, str]:
        """The verified folder of `key` and its digest, built if absent and rebuilt if damaged.

        `source` is the reference to record. Raises what `build` raises, except that on a full or
        read-only disk it builds in a temporary folder.
        """
        folder = self.models / key
        try:
            manifest = self._get_or_build(folder, source, build, progress)
        except OSError as error:
            if error.errno not in _NO_ROOM and not isinstance(error, Timeout):
                raise
            reason = error.strerror or "another process holds its lock"
            _log.warning("the weights cache is off for this run", extra=fields(reason=reason))
            record_miss("the cache cannot be used")
            return _build_temporarily(key, source, build)
        return folder, manifest.digest

    def entries(self) -> list[tuple[Path, Manifest | None]]:
        """Every folder in the cache, with manifest `None` if quarantined or unreadable."""
        if not self.models.is_dir():
            return []
        return [(folder, _manifest_or_none(folder)) for folder in sorted(self.models.iterdir())]

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Hold the entry's file lock, which the operating system frees if its holder dies."""
        assert _KEY.fullmatch(key)
        self.locks.mkdir(parents=True, exist_ok=True)
        self.models.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.locks / f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _log.info("another process is preparing these weights; waiting for it")
            lock.acquire(timeout=LOCK_TIMEOUT_S)
        try:
            yield
        finally:
            lock.release()

    def _get_or_build(
        self, folder: Path, source: str, build: Build, progress: Progress
    ) -> Manifest:
        """The entry's manifest, after building or rebuilding it if needed.

        A complete entry needs no lock, hence no writable disk: it appeared by one rename and never
        changes.
        """
        try:
            return _verify_entry(folder, progress)
        except WeightsError:
            with self._locked(folder.name):
                return self._rebuild(folder, source, build, progress)

    def _rebuild(self, folder: Path, source: str, build: Build, progress: Progress) -> Manifest:
        """Under the lock: the entry built by another process meanwhile, or a new one."""
        key = folder.name
        if folder.exists():
            try:
                return _verify_entry(folder, progress)
            except WeightsError as error:
                reason = error.message
            _log.warning("cached weights are damaged; rebuilding", extra=fields(reason=reason))
            quarantine = self.models / (key + _QUARANTINED)
            record_miss("the cached files are damaged")
            shutil.rmtree(quarantine, ignore_errors=True)
            folder.rename(quarantine)
        record_miss("not in the cache")
        partial = self.models / (key + _PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)  # left by a crashed builder
        try:
            partial.mkdir()
            build(partial)
            manifest = seal(partial, key, source)
            partial.rename(folder)
            flush(self.models)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return manifest


def convert_once(
    name: str, identity: str, build: Build, options: ModelOptions, progress: Progress
) -> tuple[Path, str]:
    """The folder that `build` fills, from the cache after the first time.

    `identity` determines the content.
    """
    key = hashlib.sha256(identity.encode()).hexdigest()
    return WeightsCache.open(options.cache_dir).get(key, name, build, progress)


def fetch_once(
    name: str, identity: str, build: Build, options: ModelOptions, progress: Progress
) -> tuple[Path, str]:
    """As `convert_once`, for a `build` that fetches. Raises `WeightsError` if offline."""

    def build_online(folder: Path) -> None:
        if options.offline:
            raise WeightsError(
                f"{name} is not in the cache and --offline forbids fetching it;"
                f" run `triptych models fetch {name}` once while online."
            )
        build(folder)

    return convert_once(name, identity, build_online, options, progress)


def default_cache_dir() -> Path:
    """The platform's cache folder: by the XDG specification, or that of macOS or Windows."""
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "triptych"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local")) / "triptych"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "triptych"


def _verify_entry(folder: Path, progress: Progress) -> Manifest:
    """The manifest of a complete entry in its own folder; otherwise raises `WeightsError`."""
    manifest = verify(folder, progress)
    if manifest.key != folder.name:
        raise WeightsError("The manifest belongs to another entry.")
    return manifest


def _manifest_or_none(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder) if _KEY.fullmatch(folder.name) else None
    except WeightsError:
        return None


def _build_temporarily(key: str, source: str, build: Build) -> tuple[Path, str]:
    """Build in the system's temporary folder, otherwise in memory; deleted at exit."""
    for parent in _temporary_parents():
        try:
            folder = Path(tempfile.mkdtemp(prefix="triptych-weights-", dir=parent))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            try:
                build(folder)
                return folder, seal(folder, key, source).digest
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
    raise WeightsError(
        "There is no space for the converted weights: free some disk space, or set --cache-dir to"
        " a folder on a larger disk."
    )


def _temporary_parents() -> Iterator[Path]:
    try:
        yield Path(tempfile.gettempdir())
    except FileNotFoundError:
        _log.info("no temporary folder is writable")
    memory = Path("/dev/shm")  # noqa: S108  # a private folder is made inside it
    if memory.is_dir():
        yield memory
