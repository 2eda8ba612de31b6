"""A decode child: `python -m triptych.core.media.worker`, started by a `DecodePool`.

Owns the confinement of one untrusted file at a time. Everything is imported first; then the process
permanently gives up the rights that a decoder never needs: it cannot open files or sockets (it has
no free descriptor), start processes, write, or take more memory than allowed. It ends with its
parent, or when its line closes. Knows nothing of formats: the functions come from the modules that
the pool names. Each has `DECODERS`, a mapping of names to functions, and `prepare`, which is called
before the confinement and must load everything the functions need; it may return such a mapping
instead.

A decode function takes the file's bytes and keyword arguments, yields the result as buffers, and
may return a small value; its `RequestError`s reach the caller.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from triptych.core.errors import InvalidRequest, PayloadTooLarge, RequestError, to_info
from triptych.core.media.wire import (
    MAX_SETUP_BYTES,
    Call,
    DecodedChunk,
    DecodeFailed,
    DecoderReady,
    Done,
    Line,
    Setup,
)
from triptych.core.process.collector import pause_collector, resume_collector
from triptych.core.transport.control import die_with_parent

DecodeFunction = Callable[..., Iterator[Any]]

_NOBODY: Final = 65534
_PR_SET_NO_NEW_PRIVS: Final = 38
_MAX_DETAIL_CHARS: Final = 2000


def main() -> None:
    """Serve requests until the line closes."""
    line = Line(socket.socket(fileno=os.dup(0)))
    try:
        setup = line.receive(Setup, max_bytes=MAX_SETUP_BYTES)
        os.nice(setup.niceness)  # before the imports: several children start at once
        pause_collector()
        functions = _functions(setup)
        resume_collector()
        _confine(setup.memory_bytes)
        line.send(DecoderReady())
        while True:
            _answer(line, functions)
    except (EOFError, OSError):
        os._exit(0)  # the pool has closed the line, or died


def _functions(setup: Setup) -> Mapping[str, DecodeFunction]:
    found: dict[str, DecodeFunction] = {}
    for module in map(importlib.import_module, setup.modules):
        prepared = module.prepare(**setup.args)
        found.update(module.DECODERS if prepared is None else prepared)
    return found


def _confine(memory_bytes: int) -> None:
    """Give up all rights that decoding does not need."""
    if sys.platform == "linux":
        # If memory still runs short, the kernel ends this process first.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        page_bytes = resource.getpagesize()
        held_bytes = page_bytes * int(Path("/proc/self/statm").read_text().split()[0])
        _limit(resource.RLIMIT_AS, held_bytes + memory_bytes)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    _drop_privileges()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NPROC, 0)
    _limit(resource.RLIMIT_NOFILE, 0)  # the line stays open


def _drop_privileges() -> None:
    """Become the user `nobody`: root could raise its limits again."""
    if os.geteuid() == 0:
        with suppress(OSError):  # in a user namespace there may be no other user
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
    die_with_parent()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _limit(what: int, most: int) -> None:
    resource.setrlimit(what, (most, most))


def _answer(line: Line, functions: Mapping[str, DecodeFunction]) -> None:
    call = line.receive(Call)
    data = line.read(call.num_bytes)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + call.cpu_s, most))
    try:
        line.send(Done(_relay(line, functions[call.name](data, **call.args))))
    except RequestError as error:
        line.send(DecodeFailed(to_info(error)))
    except MemoryError:
        line.send(
            DecodeFailed(to_info(PayloadTooLarge("The file takes too much memory to decode.")))
        )
    except Exception as error:  # the process boundary: files may make decoders raise anything
        line.send(_unexpected(error))


def _relay(line: Line, pieces: Iterator[Any]) -> Any:
    """Send the pieces as they come. Returns the function's return value."""
    while True:
        try:
            piece = memoryview(next(pieces))
        except StopIteration as end:
            return end.value
        if piece.nbytes:
            line.send(DecodedChunk(piece.nbytes), piece.cast("B"))


def _unexpected(error: Exception) -> DecodeFailed:
    public = InvalidRequest("The file could not be decoded; it may be damaged.")
    detail = "".join(traceback.format_exception(error))
    return DecodeFailed(to_info(public), detail[-_MAX_DETAIL_CHARS:])


if __name__ == "__main__":
    main()
