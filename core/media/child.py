"""Decode children: untrusted files are decoded only in separate processes.

Owns the pool: the queue of requests, the children, their replacement, and requests whose child
dies. A file that crashes its child or exceeds its memory fails only its own request. If a child is
lost for another reason (killed from outside, stopped, starved), its work is repeated once by a new
child. `core/media/worker.py` confines children; the decode functions know the formats. Chat
templates, which are untrusted programs, run in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Self

import msgspec
import psutil

from triptych.core.errors import (
    Draining,
    InternalError,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    RequestError,
    TriptychError,
    Unavailable,
    from_info,
)
from triptych.core.media.wire import Call, DecodedChunk, DecodeFailed, DecoderReady, Line, Setup
from triptych.core.options.config import ServerOptions
from triptych.core.process.logs import fields

_START_TIMEOUT_S: Final = 60.0
_GOODBYE_S: Final = 1.0
_RETRY_AFTER_S: Final = 2.0
_MAX_STALLED_CHECKS: Final = 10
"""Checks, half a second apart, of a child that uses no CPU time, before it counts as lost."""
_OWN_SIGNALS: Final = frozenset(
    {
        *(signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE),
        *(signal.SIGILL, signal.SIGTRAP, signal.SIGSYS, signal.SIGXFSZ),
    }
)
"""Signals that a process causes itself. All others come from outside."""
_INHERITED: Final = frozenset(
    {"PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL"}
)
"""The environment variables passed to children; others may hold secrets."""
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}

_CRASHED: Final = "The file crashed its decoder; it is damaged or malicious."

_log = logging.getLogger(__name__)


class FatalInput(InvalidRequest):
    """The input made its child crash, fail or take too long."""


class _ChildLost(Exception):
    """A child ended or stalled, and its input was not the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """Limits of one request, and on the number of waiting requests.

    `memory_bytes` is in addition to the memory of an idle child. `input_bytes` limits the file,
    `output_bytes` its decoded form. `niceness` is that of the child processes.
    """

    memory_bytes: int = 256 * 2**20
    cpu_s: int = 60
    wall_s: float = 240.0
    input_bytes: int = 26 * 2**20
    output_bytes: int = 256 * 2**20
    num_waiting: int = 32
    num_requests_per_child: int = 256
    niceness: int = 5


@dataclass(frozen=True, slots=True)
class Decoded:
    """The bytes that a function yielded, in one private buffer, and its return value."""

    data: memoryview
    value: Any = None


class DecodePool:
    """Decode children. Safe to share between tasks of one event loop.

    `modules` name the functions (see `core/media/worker.py`), `args` are passed to their `prepare`;
    `things` names their inputs in messages. Children start when first needed, or by `start` or
    `warm`, and end with the pool.
    """

    def __init__(
        self,
        modules: Sequence[str],
        *,
        num_children: int = 1,
        limits: DecodeLimits = DecodeLimits(),
        args: Mapping[str, Any] = MappingProxyType({}),
        things: str = "files",
    ) -> None:
        self.limits = limits
        self._things = things
        self._setup = Setup(tuple(modules), limits.memory_bytes, dict(args), limits.niceness)
        self._num_children = num_children
        self._idle: list[_DecodeChild] = []
        self._starts: list[Future[None]] = []
        self._jobs: set[_Job] = set()
        self._is_closed = False
        # One thread per child, so that no file passes through the event loop. The threads live as
        # long as the pool, because a child dies with the thread that started it.
        self._threads = ThreadPoolExecutor(num_children, thread_name_prefix="triptych-decode")
        weakref.finalize(self, _end_all, self._idle)

    @classmethod
    def from_options(cls, options: ServerOptions, modules: Sequence[str]) -> Self:
        """A pool with the number of children and the file size of `options`."""
        limits = DecodeLimits(input_bytes=options.max_upload_bytes)
        return cls(modules, num_children=options.num_decode_children, limits=limits)

    def start(self, num_children: int | None = None) -> None:
        """Begin to start `num_children` children, or all; requests wait for them."""
        for _ in range(self._num_children if num_children is None else num_children):
            self._starts.append(self._threads.submit(lambda: self._idle.append(self._start())))

    async def warm(self) -> None:
        """Start all children now. Raises `Unavailable` if they do not start."""
        starts = [self._threads.submit(self._start) for _ in range(self._num_children)]
        self._idle += await asyncio.gather(*map(asyncio.wrap_future, starts))

    async def run(self, name: str, data: bytes | bytearray | memoryview, **args: Any) -> Decoded:
        """Decode `data` by the function `name`.

        Raises the function's `RequestError`s; `FatalInput` for a file that crashes its child or
        takes too long; `PayloadTooLarge` for one that is too large or takes too much memory;
        `Unavailable` if two children were lost; `Overloaded` if too many requests wait;
        `Draining` once closed. Cancelling ends the work.
        """
        if self._is_closed:
            raise _draining()
        if len(data) > self.limits.input_bytes:
            raise PayloadTooLarge(f"The file is over {self.limits.input_bytes} bytes.")
        if len(self._jobs) >= self._num_children + self.limits.num_waiting:
            raise Overloaded(f"Too many {self._things} are waiting to be read.", retry_after_s=1)
        job = _Job(name, data, args)
        self._jobs.add(job)
        future = self._threads.submit(self._work, job)
        future.add_done_callback(lambda _: self._jobs.discard(job))
        try:
            return await asyncio.wrap_future(future)
        except (asyncio.CancelledError, TriptychError):
            job.abandon()
            if self._was_closed():
                raise _draining() from None
            raise

    async def close(self) -> None:
        """End all children; requests in progress raise `Draining`."""
        self._is_closed = True
        for job in tuple(self._jobs):
            job.abandon()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        _end_all(self._idle)

    def _was_closed(self) -> bool:
        """Whether the pool was closed, and not this task cancelled."""
        task = asyncio.current_task()
        return self._is_closed and task is not None and not task.cancelling()

    def _start(self, deadline_s: float = math.inf) -> _DecodeChild:
        try:
            return _DecodeChild(self._setup, self.limits, deadline_s)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            _log.exception("a decode child did not start")
            raise Unavailable(
                f"{self._things.capitalize()} cannot be read right now; see the server's log.",
                retry_after_s=_RETRY_AFTER_S,
            ) from error

    def _take(self) -> _DecodeChild:
        while True:
            try:
                child = self._idle.pop()
            except IndexError:
                if self._await_start():
                    continue
                return self._start()
            if child.is_alive:
                return child
            child.end()

    def _await_start(self) -> bool:
        """Wait for a child started by `start`. Returns whether one was adopted."""
        try:
            start = self._starts.pop()
        except IndexError:
            return False
        if start.running():  # otherwise it may be queued for this very thread
            wait((start,))
        return True

    def _work(self, job: _Job) -> Decoded:
        """Process one request, on a thread of the pool."""
        child = self._take()
        deadline_s = time.monotonic() + self.limits.wall_s
        try:
            return self._attempt(job, child, deadline_s)
        except _ChildLost as error:
            if time.monotonic() >= deadline_s:
                raise self._unavailable(error) from error
            _log.warning("a decode child %s; its work is repeated once", error)
        # By a new child: the idle ones may have been lost in the same way.
        try:
            return self._attempt(job, self._start(deadline_s), deadline_s)
        except _ChildLost as error:
            raise self._unavailable(error) from error

    def _attempt(self, job: _Job, child: _DecodeChild, deadline_s: float) -> Decoded:
        try:
            job.adopt(child)
            call = Call(job.name, dict(job.args), len(job.data), self.limits.cpu_s)
            return child.run(call, job.data, deadline_s)
        finally:
            job.release()
            is_worn = child.num_requests >= self.limits.num_requests_per_child
            if child.is_fit and not is_worn and not self._is_closed:
                self._idle.append(child)
            else:
                child.end()

    def _unavailable(self, error: _ChildLost) -> Unavailable:
        _log.warning("a decode child %s; its request fails", error)
        return Unavailable(
            f"The process that reads {self._things} {error}. The request is not the cause; send it"
            " again.",
            retry_after_s=_RETRY_AFTER_S,
        )


@dataclass(eq=False, slots=True)
class _Job:
    """One request, processed by a child until it is done or cancelled."""

    name: str
    data: bytes | bytearray | memoryview
    args: Mapping[str, Any]
    _child: _DecodeChild | None = None
    _is_cancelled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def adopt(self, child: _DecodeChild) -> None:
        """Set the child that `abandon` kills. Raises if already abandoned."""
        with self._lock:
            if self._is_cancelled:
                raise _cancelled()
            self._child = child

    def release(self) -> None:
        """Let the child serve another job."""
        with self._lock:
            self._child = None

    def abandon(self) -> None:
        """Stop the work on this job."""
        with self._lock:
            self._is_cancelled = True
            if self._child is not None:
                self._child.kill()


class _DecodeChild:
    """One process. All methods except `kill` are called by one thread at a time.

    Raises OSError, EOFError or `msgspec.MsgspecError` if it does not start.
    """

    def __init__(self, setup: Setup, limits: DecodeLimits, deadline_s: float) -> None:
        self._limits = limits
        self._is_killed = False
        self.num_requests = 0
        self.is_fit = True
        self._process, self._line = _spawn(setup.modules)
        self._line.deadline_s = min(deadline_s, time.monotonic() + _START_TIMEOUT_S)
        try:
            self._line.send(setup)
            self._line.receive(DecoderReady)
        except (OSError, EOFError, msgspec.MsgspecError):
            self.end()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the process runs and was not killed."""
        return not self._is_killed and self._process.poll() is None

    def run(self, call: Call, data: bytes | bytearray | memoryview, deadline_s: float) -> Decoded:
        """Process one request. Raises also `_ChildLost`."""
        self.num_requests += 1
        self.is_fit = False  # until the request succeeds
        self._line.deadline_s = deadline_s
        self._line.on_wait = _Pulse(self._process.pid).check
        try:
            self._line.send(call, data)
            decoded = self._collect()
        except TimeoutError as error:
            raise _ChildLost("stalled, or got too little CPU time") from error
        except msgspec.MsgspecError as error:
            raise FatalInput(_CRASHED) from error
        except (OSError, EOFError) as error:
            raise self._post_mortem() from error
        self.is_fit = True
        return decoded

    def _collect(self) -> Decoded:
        # Private memory that costs nothing until it is filled: the result is never copied.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        view = memoryview(mmap.mmap(-1, self._limits.output_bytes, flags=flags))
        num_bytes = 0
        while isinstance(reply := self._line.receive_reply(), DecodedChunk):
            if not 0 <= reply.num_bytes <= len(view) - num_bytes:
                raise PayloadTooLarge(f"The file holds over {len(view)} bytes when decoded.")
            self._line.fill(view[num_bytes : num_bytes + reply.num_bytes])
            num_bytes += reply.num_bytes
        if isinstance(reply, DecodeFailed):
            raise self._error_of(reply)
        return Decoded(view[:num_bytes], reply.value)

    def _error_of(self, reply: DecodeFailed) -> TriptychError:
        error = from_info(reply.error)
        if reply.detail:
            _log.warning("a file could not be decoded", extra=fields(traceback=ascii(reply.detail)))
        self.is_fit = isinstance(error, RequestError)
        if not self.is_fit:
            return InternalError("The file could not be decoded.")
        return FatalInput(error.message) if reply.detail else error

    def _post_mortem(self) -> FatalInput | InvalidRequest | _ChildLost:
        """The reason for a closed line, from the exit code; waits a moment for the exit."""
        try:
            code = self._process.wait(_GOODBYE_S)
        except subprocess.TimeoutExpired:  # it closed its line but still runs
            return FatalInput(_CRASHED)
        if self._is_killed:
            return _cancelled()
        _log.warning("a decode child died", extra=fields(exit_code=code))
        if code < 0 and -code not in _OWN_SIGNALS:
            return _ChildLost(f"was ended by signal {-code}")
        if code == -signal.SIGXCPU:
            return FatalInput(
                f"The file takes over {self._limits.cpu_s} s to decode; send a smaller one."
            )
        return FatalInput(_CRASHED)

    def kill(self) -> None:
        """End the process at once, from any thread."""
        self._is_killed = True
        self._process.kill()

    def end(self) -> None:
        """Close the line, and wait for the process to exit."""
        self._line.close()
        try:
            self._process.wait(0 if not self.is_fit else _GOODBYE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()


def _spawn(modules: Sequence[str]) -> tuple[subprocess.Popen[bytes], Line]:
    """Start a new interpreter, in its own process group so that Ctrl-C does not reach it.

    Its arguments name the `modules`, for process lists.
    """
    ours, theirs = socket.socketpair()
    inherited = {name: os.environ[name] for name in _INHERITED & os.environ.keys()}
    with theirs:
        process = subprocess.Popen(  # noqa: S603 - the modules are ours
            (sys.executable, "-P", "-m", "triptych.core.media.worker", *modules),
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            env=_ONE_THREAD | inherited,
            process_group=0,
        )
    return process, Line(ours)


class _Pulse:
    """Detects a process that has work but uses no CPU time.

    It counts checks, not seconds, so that a pause of this process does not count.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._used_s = -1.0
        self._num_stalled_checks = 0

    def check(self) -> None:
        """Check once. Raises TimeoutError after too many checks without change."""
        with suppress(psutil.Error):  # it has just ended, which the closed line reports
            user_s, system_s, *_ = psutil.Process(self._pid).cpu_times()
            has_moved = user_s + system_s != self._used_s
            self._used_s = user_s + system_s
            self._num_stalled_checks = 0 if has_moved else self._num_stalled_checks + 1
        if self._num_stalled_checks >= _MAX_STALLED_CHECKS:
            raise TimeoutError("a decode child has stalled")


def _end_all(children: list[_DecodeChild]) -> None:
    while children:
        children.pop().end()


def _cancelled() -> InvalidRequest:
    return InvalidRequest("The request was cancelled.")


def _draining() -> Draining:
    return Draining("The server is shutting down.", retry_after_s=1)
