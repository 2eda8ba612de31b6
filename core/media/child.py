"""Decode children: untrusted files are decoded in processes of their own, and never here.

Owns the pool: the queue of requests, their children, when a child is replaced, and the error of a
request whose child dies. A file that crashes, hangs or bloats its child costs that request alone.
What a child may do is `core/media/worker.py`'s; what a file means, that of the functions it serves.
Chat templates, which are foreign programs, are run in the same way.
"""

from __future__ import annotations

import asyncio
import logging
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
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Self

import msgspec

from triptych.core.config import ServerOptions
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
from triptych.core.logs import fields
from triptych.core.media.wire import Call, DecodedChunk, DecodeFailed, DecoderReady, Line, Setup

_START_TIMEOUT_S: Final = 60.0
_GOODBYE_S: Final = 1.0
_INHERITED: Final = frozenset(
    {"PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL"}
)
"""All that a child learns of our environment, which may hold secrets."""
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """What one request may take, and how many may wait.

    `memory_bytes` come on top of what a child holds when it is idle. Input and output are what a
    file has in bytes, and what comes of it. `niceness` is how far children step back for others.
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
    """What a function yielded, in one piece of memory of its own, and what it returned."""

    data: memoryview
    value: Any = None


class DecodePool:
    """Children that decode. Safe to share between tasks of one event loop.

    `modules` name the functions (see `core/media/worker.py`), `args` are what they are prepared
    with; `things` names their work in messages. Children are started when first needed, or by
    `start` or `warm`, and end with the pool.
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
        # One thread per child talks to it, so that no file passes the event loop. The threads last
        # as long as the pool: a child dies with the thread that started it.
        self._threads = ThreadPoolExecutor(num_children, thread_name_prefix="triptych-decode")
        weakref.finalize(self, _end_all, self._idle)

    @classmethod
    def from_options(cls, options: ServerOptions, modules: Sequence[str]) -> Self:
        """A pool as large as `options` say, for files as large as they allow."""
        limits = DecodeLimits(input_bytes=options.max_upload_bytes)
        return cls(modules, num_children=options.num_decode_children, limits=limits)

    def start(self, num_children: int | None = None) -> None:
        """Begin to start so many children, or all; requests that need one wait for it."""
        for _ in range(self._num_children if num_children is None else num_children):
            self._starts.append(self._threads.submit(lambda: self._idle.append(self._start())))

    async def warm(self) -> None:
        """Start all children now. Raises `Unavailable` where they do not start."""
        starts = [self._threads.submit(self._start) for _ in range(self._num_children)]
        self._idle += await asyncio.gather(*map(asyncio.wrap_future, starts))

    async def run(self, name: str, data: bytes | bytearray | memoryview, **args: Any) -> Decoded:
        """Have function `name` decode `data`.

        Raises what the function raises of `RequestError`; `InvalidRequest` for a file that
        crashes its child or takes too long; `PayloadTooLarge` for one that takes or yields too
        much; `Overloaded` where too many wait; `Draining` once closed. Cancelling ends the work.
        """
        if self._is_closed:
            raise _draining()
        if len(data) > self.limits.input_bytes:
            raise PayloadTooLarge(f"The file is over {self.limits.input_bytes} bytes.")
        if len(self._jobs) >= self._num_children + self.limits.num_waiting:
            raise Overloaded(f"Too many {self._things} wait to be read.", retry_after_s=1)
        job = _Job(name, data, args)
        self._jobs.add(job)
        future = self._threads.submit(self._work, job)
        future.add_done_callback(lambda _: self._jobs.discard(job))
        try:
            return await asyncio.wrap_future(future)
        except (asyncio.CancelledError, TriptychError):
            job.abandon()
            if self._was_closed_on():
                raise _draining() from None
            raise

    async def close(self) -> None:
        """End all children, and what they work on with `Draining`."""
        self._is_closed = True
        for job in tuple(self._jobs):
            job.abandon()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        _end_all(self._idle)

    def _was_closed_on(self) -> bool:
        """Whether it was not this task that gave up, but the pool."""
        task = asyncio.current_task()
        return self._is_closed and task is not None and not task.cancelling()

    def _start(self) -> _DecodeChild:
        try:
            return _DecodeChild(self._setup, self.limits)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            _log.exception("a decode child did not start")
            raise Unavailable(
                f"{self._things.capitalize()} cannot be read right now; the server's log says why."
            ) from error

    def _take(self) -> _DecodeChild:
        while True:
            try:
                child = self._idle.pop()
            except IndexError:
                if self._awaited_start():
                    continue
                return self._start()
            if child.is_alive:
                return child
            child.end()

    def _awaited_start(self) -> bool:
        """Wait for a child that `start` is starting; whether there was one nobody waited for."""
        try:
            start = self._starts.pop()
        except IndexError:
            return False
        if start.running():  # it may be queued for this very thread
            wait((start,))
        return True

    def _work(self, job: _Job) -> Decoded:
        """On a thread of the pool: the whole of one request."""
        child = self._take()
        try:
            job.adopt(child)
            call = Call(job.name, dict(job.args), len(job.data), self.limits.cpu_s)
            return child.run(call, job.data)
        finally:
            job.release()
            is_worn = child.num_requests >= self.limits.num_requests_per_child
            if child.is_fit and not is_worn and not self._is_closed:
                self._idle.append(child)
            else:
                child.end()


@dataclass(eq=False, slots=True)
class _Job:
    """One request. A child works on it until it is done or cancelled."""

    name: str
    data: bytes | bytearray | memoryview
    args: Mapping[str, Any]
    _child: _DecodeChild | None = None
    _is_cancelled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def adopt(self, child: _DecodeChild) -> None:
        """From here on `child` is killed when the job is abandoned."""
        with self._lock:
            if self._is_cancelled:
                raise InvalidRequest("The request was cancelled.")
            self._child = child

    def release(self) -> None:
        """From here on the child may serve another job."""
        with self._lock:
            self._child = None

    def abandon(self) -> None:
        """Stop whatever is being done for the job."""
        with self._lock:
            self._is_cancelled = True
            if self._child is not None:
                self._child.kill()


class _DecodeChild:
    """One process. All but `kill` is called by one thread at a time.

    Raises OSError, EOFError or `msgspec.MsgspecError` where it does not start.
    """

    def __init__(self, setup: Setup, limits: DecodeLimits) -> None:
        self._limits = limits
        self._is_killed = False
        self.num_requests = 0
        self.is_fit = True
        self._process, self._line = _spawn(setup.modules)
        self._line.deadline_s = time.monotonic() + _START_TIMEOUT_S
        try:
            self._line.send(setup)
            self._line.receive(DecoderReady)
        except (OSError, EOFError, msgspec.MsgspecError):
            self.end()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs, and goes on doing so."""
        return not self._is_killed and self._process.poll() is None

    def run(self, call: Call, data: bytes | bytearray | memoryview) -> Decoded:
        """One request, from the first byte down to the last one up."""
        self.num_requests += 1
        self.is_fit = False  # until it has shown that it is
        self._line.deadline_s = time.monotonic() + self._limits.wall_s
        try:
            self._line.send(call, data)
            decoded = self._collect()
        except TimeoutError as error:
            raise self._too_slow() from error
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            raise self._post_mortem() from error
        self.is_fit = True
        return decoded

    def _collect(self) -> Decoded:
        # Private memory that costs nothing until it is filled, so that nothing is copied later.
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
        return error if self.is_fit else InternalError("The file could not be decoded.")

    def _too_slow(self) -> InvalidRequest:
        return InvalidRequest(
            f"The file takes over {self._limits.cpu_s} s of work, or {self._limits.wall_s:g} s in"
            " all, to decode; send a smaller one."
        )

    def _post_mortem(self) -> InvalidRequest:
        was_wanted = not self._is_killed
        self.kill()
        code = self._process.wait()
        if was_wanted:
            _log.warning("a decode child died", extra=fields(exit_code=code))
        if code == -signal.SIGXCPU:
            return self._too_slow()
        return InvalidRequest("The file made its decoder crash; it is damaged or hostile.")

    def kill(self) -> None:
        """End the process at once, from any thread."""
        self._is_killed = True
        self._process.kill()

    def end(self) -> None:
        """Close the line, and see the process gone."""
        self._line.close()
        try:
            self._process.wait(0 if not self.is_fit else _GOODBYE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()


def _spawn(modules: Sequence[str]) -> tuple[subprocess.Popen[bytes], Line]:
    """A fresh interpreter, in a group of its own so that Ctrl-C leaves it alone.

    Its arguments name the `modules` for readers of process lists.
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


def _end_all(children: list[_DecodeChild]) -> None:
    while children:
        children.pop().end()


def _draining() -> Draining:
    return Draining("The server is shutting down.", retry_after_s=1)
