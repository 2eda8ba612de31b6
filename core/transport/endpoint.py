"""Where API and engine process meet: Unix sockets in a folder closed to others.

Owns the folder, its permissions, and how sockets are opened on it. Knows nothing of the messages.
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
    """A folder of mode 0700 for the time of the context: `base`, or a temporary one if empty.

    Temporary ones that killed processes of this user have left behind are removed.
    `role` is locked in a shared `base`, so that two servers never take each other's sockets.
    Raises `ConfigError` where the folder is open to others, in use, or its path is too long.
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
        raise ConfigError(f"--zmq-endpoint-base cannot be made: {error.strerror}.") from error
    with _locked(_checked(folder) / f"{role}.lock", role):
        yield folder


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A new folder with a lock that is held as long as the folder is in use."""
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
    """Remove temporary folders of this user whose owner was killed. Any other is left alone."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # not ours, gone meanwhile, or its owner lives
            if not _is_private(folder.lstat()):
                continue
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(folder / OWNER_NAME, flags)) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _is_private(status: os.stat_result) -> bool:
    """Whether it is a folder (no link to one) that this user alone may enter."""
    is_closed = not stat.S_IMODE(status.st_mode) & 0o077
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and is_closed


def _checked(folder: Path) -> Path:
    if not _is_private(folder.stat()):
        raise ConfigError(
            f"--zmq-endpoint-base {folder} must belong to the user of this process and nobody"
            " else may enter it: chmod 700 it, or name a new folder."
        )
    if len(os.fsencode(folder / SOCKET_NAME)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"The socket folder {folder} has too long a path; name a shorter one with"
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
    router.router_mandatory = 1  # sending to an engine that is gone raises, instead of nothing
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
    """A peer's end; connects as soon as the API process is there, again when it comes back.

    Nothing is kept for an API process that is not there: use `send_if_connected`. Only `term` of a
    `context` of its own waits until what was sent has left the process.
    """
    dealer = _open(zmq.DEALER, context)
    dealer.identity = identity
    dealer.immediate = 1
    dealer.reconnect_ivl = 20
    dealer.reconnect_ivl_max = 100
    dealer.connect(f"ipc://{folder / SOCKET_NAME}")
    return dealer


def send_if_connected(dealer: zmq.Socket[bytes], *messages: bytes) -> None:
    """Send messages together, or drop them without a listener; never blocks."""
    with suppress(zmq.Again):
        dealer.send_multipart(messages, zmq.NOBLOCK)


def _open(kind: int, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> zmq.Socket[bytes]:
    """A socket whose queue has no bound of its own: admission bounds what can be in flight."""
    opened: zmq.Socket[bytes] = (context or zmq.Context.instance()).socket(kind)
    opened.sndhwm = opened.rcvhwm = 0
    opened.maxmsgsize = MAX_MESSAGE_BYTES
    opened.linger = 0
    return opened
