"""Decode functions that misbehave, each in its own way, for a decode child to be tried with."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from triptych.core.errors import InvalidRequest

MODULE = "support.faulty_decoders"


def prepare() -> None: ...


def echo(data: bytes, *, times: int = 1) -> Iterator[bytes]:
    for _ in range(times):
        yield data
    return os.getpid()


def refuse(data: bytes) -> Iterator[bytes]:
    yield data
    raise InvalidRequest("It is out of tune.", param="file")


def stumble(data: bytes) -> Iterator[bytes]:
    yield data
    raise KeyError("/secret/path")


def crash(data: bytes) -> Iterator[bytes]:
    yield data
    ctypes.string_at(0)


def leave(data: bytes) -> Iterator[bytes]:
    yield data
    os._exit(0)


def loop(data: bytes) -> Iterator[bytes]:
    while True:
        yield b""


def sleep(data: bytes) -> Iterator[bytes]:
    yield data
    time.sleep(600)


def bloat(data: bytes) -> Iterator[bytes]:
    yield bytes(8 * 2**30)


def flood(data: bytes) -> Iterator[bytes]:
    while True:
        yield bytes(2**20)


def babble(data: bytes) -> Iterator[bytes]:
    for descriptor in range(3, 100):  # one of them is the line
        try:
            os.write(descriptor, b"\xff" * 64)
        except OSError:
            continue
    yield data


def lie(data: bytes) -> Iterator[Any]:
    """Return what is too long for a message."""
    yield data
    return "x" * 10**6


def environment(data: bytes) -> Iterator[bytes]:
    yield data
    return dict(os.environ)


ATTEMPTS: dict[str, Callable[[str], object]] = {
    "read": lambda path: Path(path).read_bytes(),
    "write": lambda path: Path(path).write_bytes(b"x"),
    "network": lambda _: socket.create_connection(("127.0.0.1", 9)),
    "unix": lambda _: socket.socket(socket.AF_UNIX),
    "pipe": lambda _: os.pipe(),
    "program": lambda _: subprocess.run([sys.executable, "-c", ""], check=True),
    "memory": lambda _: os.memfd_create("x"),
    "thread": lambda _: threading.Thread(target=print).start(),
    "fork": lambda _: os.fork() or os._exit(0),
    "raise": lambda _: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)),
    "print": lambda _: os.write(2, b"x" * 10),
}


def attempt(data: bytes, *, what: str, path: str = "") -> Iterator[bytes]:
    """Try something forbidden; return the name of the error, or `done`."""
    yield data
    try:
        ATTEMPTS[what](path)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "?")
    except (RuntimeError, ValueError) as error:
        return type(error).__name__
    return "done"


DECODERS = {
    function.__name__: function
    for function in (
        *(echo, refuse, stumble, crash, leave, loop, sleep, bloat, flood, babble, lie),
        *(environment, attempt),
    )
}
