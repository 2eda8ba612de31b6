"""The servers of this user that run on this machine, each with a file that has its address.

Owns the folder and its files. Only the user can write there, and a server keeps its file locked
for its life, so a command sends nothing to another process that has the server's process id or
port. Knows nothing of requests.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkstemp

import msgspec

from triptych.core.process.typed import decode_json

_log = logging.getLogger(__name__)


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A server that was started: its URL, its machine, its process, its start (seconds)."""

    url: str
    host: str
    pid: int
    started_s: float


def records_folder() -> Path:
    """Return the folder of the records, which may not exist. Raises `OSError` without a home."""
    for variable in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        if given := os.environ.get(variable):
            return Path(given) / "triptych" / "servers"
    try:
        return Path.home() / ".local" / "state" / "triptych" / "servers"
    except RuntimeError as error:  # a user without an entry, as in some containers
        raise OSError("this user has no home folder") from error


@contextmanager
def recorded(url: str) -> Iterator[None]:
    """Keep a record of this process's server while the block runs.

    Without a folder to write to, commands do not find the server by themselves.
    """
    record = ServerRecord(
        url=_reachable(url), host=platform.node(), pid=os.getpid(), started_s=time.time()
    )
    lock = _write(record)
    try:
        yield
    finally:
        if lock is not None:
            _remove(_path(record))
            os.close(lock)


def running_servers() -> list[ServerRecord]:
    """Return the records of this machine whose servers run, the latest server first.

    Damaged records and those of ended servers are removed. Other machines may share the folder;
    their records stay.
    """
    found = []
    for path in _paths():
        record = _read(path)
        if record is None or ((is_own := record.host == platform.node()) and not _is_locked(path)):
            _remove(path)
        elif is_own:
            found.append(record)
    return sorted(found, key=lambda record: -record.started_s)


def _paths() -> list[Path]:
    try:
        return list(records_folder().glob("*.json"))
    except OSError:
        return []


def _path(record: ServerRecord) -> Path:
    return records_folder() / f"{record.host}-{record.pid}.json"


def _write(record: ServerRecord) -> int | None:
    """Write a record; return the descriptor that locks it, or `None` where that is impossible."""
    try:
        path = _path(record)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _write_locked(path, msgspec.json.encode(record))
    except OSError as error:
        _log.debug("commands cannot find this server by themselves: %s", error)
        return None


def _write_locked(path: Path, content: bytes) -> int:
    """Write a file that is locked before it has its name, as an unlocked one may be removed."""
    file, partial = mkstemp(dir=path.parent)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.write(file, content)
        os.replace(partial, path)
    except OSError:
        os.unlink(partial)
        os.close(file)
        raise
    return file


def _read(path: Path) -> ServerRecord | None:
    try:
        if path.stat().st_uid != os.getuid():
            return None
        return decode_json(path.read_bytes(), ServerRecord)
    except (OSError, msgspec.DecodeError) as error:
        _log.debug("%s is no record of a server: %s", path.name, type(error).__name__)
        return None


def _is_locked(path: Path) -> bool:
    """Whether a server holds the lock, which ends with its process, however that ends."""
    with suppress(OSError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: other commands look as well
        except BlockingIOError:
            return True
    return False


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.debug("%s cannot be removed: %s", path.name, error.strerror)


def _reachable(url: str) -> str:
    """Return the URL by which this machine reaches a server that listens on all addresses."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
