"""The ZeroMQ sockets between the API process and its peers, in a private folder.

Owns the folder (mode 0700, locked against a second server; a temporary one that a killed process
left is removed at the next start), the API process's ROUTER, and the DEALER of each peer: the
engine and the supervisor. `send_if_connected` drops a message for an absent API process. Knows the
maximum length of messages, not their contents.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import zmq

from triptych.core.errors import ConfigError
from triptych.core.transport.messages import MAX_MESSAGE_BYTES

SOCKET_NAME = "engine.sock"
OWNER_NAME = "owner.lock"
MAX_SOCKET_PATH_BYTES = 107
_PREFIX = "triptych-"


@contextmanager
def private_folder(base: str, *, role: str) -> Iterator[Path]:
    """A folder of mode 0700 for the block: `base`, or a temporary one if empty.

    Removes temporary folders left by killed processes of this user. `role` is locked in a shared
    `base`, so that two servers never use each other's sockets. Raises `ConfigError` if other users
    may enter the folder, if it is in use, or if its path is too long.
    """
    if not base:
        _clear_abandoned(Path(tempfile.gettempdir()))
        with _temporary_folder() as folder:
            yield _checked(folder)
        return
    folder = Path(base).expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--zmq-endpoint-base cannot be created: {error.strerror}.") from error
    with _locked(_checked(folder) / f"{role}.lock", role):
        yield folder


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A new folder with a lock held while the folder is in use."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        new = folder / f"{OWNER_NAME}.new"
        with os.fdopen(os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(folder / OWNER_NAME)  # it never appears unlocked
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clear_abandoned(parent: Path) -> None:
    """Remove this user's temporary folders whose owning process was killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, gone meanwhile, or its owner is alive
            if not _is_private(folder.lstat()):
                continue
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(folder / OWNER_NAME, flags)) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _is_private(status: os.stat_result) -> bool:
    """Whether it is a folder, not a link, that only this user may enter."""
    is_closed = not stat.S_IMODE(status.st_mode) & 0o077
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and is_closed


def _checked(folder: Path) -> Path:
    if not _is_private(folder.stat()):
        raise ConfigError(
            f"--zmq-endpoint-base {folder} must belong to the user of this process and be closed to"
            " other users: run chmod 700 on it, or name a new folder."
        )
    if len(os.fsencode(folder / SOCKET_NAME)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"The path of the socket folder {folder} is too long; set a shorter one with"
            " --zmq-endpoint-base."
        )
    return folder


@contextmanager
def _locked(path: Path, role: str) -> Iterator[None]:
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"Another server's {role} uses --zmq-endpoint-base {path.parent}."
            ) from error
        yield


def bind_router(folder: Path) -> zmq.Socket[bytes]:
    """The API process's end: a ROUTER on a socket of mode 0600."""
    router = _open(zmq.ROUTER)
    router.router_mandatory = 1  # sending to an engine that is gone raises
    router.router_handover = 1  # a supervisor that reconnects keeps its name
    path = folder / SOCKET_NAME
    umask = os.umask(0o177)
    try:
        router.bind(f"ipc://{path}")
    finally:
        os.umask(umask)
    return router


def connect_dealer(
    folder: Path, identity: bytes, context: zmq.Context[zmq.Socket[bytes]] | None = None
) -> zmq.Socket[bytes]:
    """A peer's end; connects once the API process is up, and again after it restarts.

    Messages are not queued for an absent API process: use `send_if_connected`. Only `term` of a
    separate `context` waits until sent messages have left the process.
    """
    dealer = _open(zmq.DEALER, context)
    dealer.identity = identity
    dealer.immediate = 1
    dealer.reconnect_ivl = 20
    dealer.reconnect_ivl_max = 100
    dealer.connect(f"ipc://{folder / SOCKET_NAME}")
    return dealer


def send_if_connected(dealer: zmq.Socket[bytes], message: bytes) -> None:
    """Send a message, or drop it if not connected; never blocks."""
    with suppress(zmq.Again):
        dealer.send(message, zmq.NOBLOCK)


def _open(kind: int, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> zmq.Socket[bytes]:
    """A socket with an unbounded queue: admission bounds the messages in flight."""
    opened: zmq.Socket[bytes] = (context or zmq.Context.instance()).socket(kind)
    opened.sndhwm = opened.rcvhwm = 0
    opened.maxmsgsize = MAX_MESSAGE_BYTES
    opened.linger = 0
    return opened
