"""The servers of this user that run on this machine, each with a file that has its address.

Owns the folder and its files. Only the user can write there, so a command never sends a prompt to
another user's server because of its port. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from triptych.core.process.atomic_files import write_whole
from triptych.core.process.typed import decode_json

_log = logging.getLogger(__name__)


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A server that was started: its URL on this machine, its process, its start (seconds)."""

    url: str
    pid: int
    started_s: float


def records_folder() -> Path:
    """Return the folder of the records, which may not exist."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(runtime or state) / "triptych" / "servers"


@contextmanager
def recorded(url: str) -> Iterator[None]:
    """Keep a record of this process's server while the block runs.

    Without a folder to write to, commands do not find the server by themselves.
    """
    path = records_folder() / f"{os.getpid()}.json"
    record = ServerRecord(url=_reachable(url), pid=os.getpid(), started_s=time.time())
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, (msgspec.json.encode(record),), is_durable=False)
    except OSError as error:
        _log.debug("commands cannot find this server by themselves: %s", error.strerror)
    try:
        yield
    finally:
        _remove(path)


def running_servers() -> list[ServerRecord]:
    """Return the records of living processes, the latest server first; remove all others."""
    found = []
    for path in records_folder().glob("*.json"):
        record = _read(path)
        if record is not None and _is_alive(record.pid):
            found.append(record)
        else:
            _remove(path)
    return sorted(found, key=lambda record: -record.started_s)


def _read(path: Path) -> ServerRecord | None:
    try:
        if path.stat().st_uid != os.getuid():
            return None
        return decode_json(path.read_bytes(), ServerRecord)
    except (OSError, msgspec.DecodeError) as error:
        _log.debug("%s is no record of a server: %s", path.name, type(error).__name__)
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.debug("%s cannot be removed: %s", path.name, error.strerror)


def _reachable(url: str) -> str:
    """Return the URL by which this machine reaches a server that listens on all addresses."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
