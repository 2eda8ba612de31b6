"""The control line between a supervisor and one child: a socket pair as the child's standard input.

Owns the messages. The supervisor sends the configuration (one line of JSON) and the drain command;
the child sends start-up phases, cache hits and misses (`core.process.lookups`), beats, states of
models, facts for later starts, and the reason of a failed start, one JSON object per line. A closed
connection means that the other end is dead. The child obeys only this line and ignores SIGINT and
SIGTERM, so that a signal to the whole group or container still drains in order.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn, Self

import msgspec

from triptych.core.engine_api.reports import ModelStatus
from triptych.core.errors import SetupError, TriptychError
from triptych.core.process.lookups import Lookup

DRAIN = b"drain\n"
EXIT_SETUP_FAILED = 3
"""A child's exit code after `Failed`: a restart cannot help."""

_PR_SET_PDEATHSIG = 1
_log = logging.getLogger(__name__)


class Phase(msgspec.Struct, frozen=True, tag=True):
    """A phase of the start is over; it began with the process or after the previous phase."""

    name: str
    note: str = ""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The child makes progress; it counts as hung if no beat follows within `stall_budget_s`."""

    stall_budget_s: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The child has started and is serving."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The child cannot start until a person fixes the cause; `message` is one actionable line."""

    message: str
    code: str = SetupError.code


class StartFacts(msgspec.Struct, frozen=True, tag=True):
    """Fields added to the configuration of every later start of this child.

    If `is_shared`, also to that of the other children.
    """

    fields: dict[str, Any]
    is_shared: bool = False


class ModelNote(msgspec.Struct, frozen=True, tag=True):
    """The state of a model in the engine has changed; `memory_bytes` are its own on the device."""

    status: ModelStatus
    memory_bytes: int = 0


FromChild = Phase | Beat | Ready | Failed | StartFacts | ModelNote | Lookup


class ControlLine:
    """The child's end of the line. `open` must be the first call of the process."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._encode = msgspec.json.Encoder().encode
        self._is_draining = False
        self._on_drain: Callable[[], object] | None = None
        self._lock = threading.Lock()

    @classmethod
    def open(cls) -> Self:
        """Take the line from standard input, and tie this process's life to its parent's."""
        die_with_parent()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        line = socket.socket(fileno=os.dup(0))
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)  # subprocesses must not hold or read the line
        os.close(null)
        return cls(line)

    def read_config(self) -> bytes:
        """Wait for the configuration, then read the line on a separate thread.

        Until `on_drain` sets a callback, the drain command ends this process at once.
        """
        reader = self._line.makefile("rb")
        config = reader.readline()
        if not config.endswith(b"\n"):
            os._exit(1)
        threading.Thread(
            target=self._follow, args=(reader,), name="triptych-control", daemon=True
        ).start()
        return config

    def on_drain(self, callback: Callable[[], object]) -> None:
        """Call `callback`, on the line's thread, when the supervisor sends the drain command."""
        with self._lock:
            self._on_drain = callback
            is_late = self._is_draining
        if is_late:
            callback()

    def send(self, note: FromChild) -> None:
        """Send to the supervisor; never blocks. The message is lost if the supervisor is stuck."""
        try:
            self._line.send(self._encode(note) + b"\n", socket.MSG_DONTWAIT)
        except OSError as error:
            _log.debug("a message to the supervisor was lost: %s", error)

    def _follow(self, reader: socket.SocketIO) -> None:
        while command := reader.readline():
            if command == DRAIN:
                self._drain()
        os._exit(1)  # the supervisor is dead

    def _drain(self) -> None:
        with self._lock:
            self._is_draining, callback = True, self._on_drain
        if callback is None:
            os._exit(0)
        callback()


def run_child(line: ControlLine, work: Callable[[], None], log: logging.Logger) -> NoReturn:
    """Run a child's `work`, then exit at once, without waiting for threads that hang."""
    try:
        work()
        code = 0
    except SetupError as error:
        line.send(Failed(error.message, error.code))
        code = EXIT_SETUP_FAILED
    except TriptychError as error:  # logged where it happened
        log.error("the process ends: %s", error.message)
        code = 1
    except Exception:  # the boundary of the process; its supervisor starts another
        log.exception("the process crashed")
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, even if it hangs."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
