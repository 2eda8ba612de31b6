"""Supervision of child processes: start, watch, restart, give up, drain.

Owns the life cycle of children that speak `core.transport.control`. Knows nothing of their work,
and imports no torch, so it survives device faults.

An exit is noticed at once; a child that sends no beat within its stall budget must dump its stacks
(SIGUSR1) and is killed. The budget counts only time in which this process itself ran, so that a
suspended machine kills no child. Both are crashes: the child restarts after a backoff, and the
third crash within five minutes opens the circuit and ends the whole tree. The first SIGTERM or
SIGINT drains the children in the order given; a second one kills them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from triptych.core.errors import ErrorInfo, SetupError, TriptychError, from_info
from triptych.core.process.typed import decode_json
from triptych.core.transport.control import DRAIN, Beat, Failed, FromChild, Ready, StartFacts
from triptych.core.transport.silence_timer import SilenceTimer

_log = logging.getLogger(__name__)

LISTEN_INTERVAL_S = 0.1
DUMP_TIME_S = 0.5
"""How long a hung child may take to write its stacks."""
DRAIN_SLACK_S = 5.0
"""How much longer than the drain timeout a child may take to send its last messages and exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """How to start one child: `config` is one line of JSON, sent over its control line.

    `env` is its whole environment, `stderr` its error output; `None`: that of this process.
    """

    name: str
    argv: tuple[str, ...]
    config: bytes
    pass_fds: tuple[int, ...] = ()
    env: Mapping[str, str] | None = None
    stderr: int | None = None

    def with_fields(self, fields: Mapping[str, Any]) -> ChildSpec:
        """A copy with `fields` added to its configuration, a JSON object."""
        if not fields:
            return self
        config = decode_json(self.config, dict[str, msgspec.Raw])
        added = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
        return replace(self, config=msgspec.json.encode(config | added))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits on crashes, backoff and time. `start_budget_s` holds until a child's first beat."""

    start_budget_s: float = 120.0
    max_crashes: int = 3
    crash_window_s: float = 300.0
    first_backoff_s: float = 0.25
    max_backoff_s: float = 10.0
    drain_timeout_s: float = 30.0


class Observer(Protocol):
    """Callbacks for events of the children."""

    def on_note(self, child: str, note: FromChild) -> None:
        """A child sent a message."""

    def on_gone(self, child: str, reason: str, restart_in_s: float | None) -> None:
        """A child died; it restarts after `restart_in_s`, or never if `None`."""

    def on_drain(self) -> None:
        """The children are about to drain."""


class Supervisor:
    """Runs children until stopped. For one use."""

    def __init__(self, specs: Sequence[ChildSpec], policy: Policy, observer: Observer) -> None:
        self._specs = specs
        self._policy = policy
        self._observer = observer
        self._children: dict[str, _SupervisedProcess] = {}
        self._shared: dict[str, Any] = {}
        self._signals: asyncio.Queue[int] = asyncio.Queue()
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Run the children until a signal; the exit code is 0 after a clean drain.

        Raises `SetupError` with a one-line message when a child cannot start or keeps crashing.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, number)
        supervisions = {asyncio.create_task(self._supervise(spec)) for spec in self._specs}
        stopper = asyncio.create_task(self._stop())
        try:
            done, _ = await asyncio.wait(
                {*supervisions, stopper}, return_when=asyncio.FIRST_COMPLETED
            )
            if stopper not in done:
                (supervision, *_) = done
                await supervision
            return await stopper
        finally:
            self._stopping.set()
            for task in (*supervisions, stopper):
                task.cancel()  # this ends its child
            await asyncio.gather(*supervisions, stopper, return_exceptions=True)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Drain, as on a first signal `number`; a second call kills the children."""
        self._signals.put_nowait(number)

    async def _supervise(self, spec: ChildSpec) -> None:
        """Run and restart `spec`. Returns only while stopping."""
        crashes: deque[float] = deque(maxlen=self._policy.max_crashes)
        was_ready, kept = False, dict[str, Any]()
        while not self._stopping.is_set():
            child = await _SupervisedProcess.start(
                spec.with_fields(self._shared | kept), self._policy.start_budget_s, self._observer
            )
            child.shared = self._shared
            self._children[spec.name] = child
            try:
                reason = await child.run()
            finally:
                del self._children[spec.name]
            was_ready, kept = was_ready or child.is_ready, child.kept | kept
            if self._stopping.is_set():
                return
            if child.failure is not None and not was_ready:
                raise child.failure
            crashes.append(time.monotonic())
            delay_s = self._backoff_s(crashes)
            self._observer.on_gone(spec.name, reason, delay_s)
            if delay_s is None:
                raise SetupError(
                    f"The {spec.name} process {reason}. It is not restarted after {len(crashes)}"
                    f" crashes within {crashes[-1] - crashes[0]:.0f} s; see the log for the cause."
                )
            await asyncio.sleep(delay_s)

    def _backoff_s(self, crashes: deque[float]) -> float | None:
        """The delay before the next restart; `None` when the circuit opens."""
        recent = [at for at in crashes if crashes[-1] - at <= self._policy.crash_window_s]
        if len(recent) >= self._policy.max_crashes:
            return None
        backoff_s = self._policy.first_backoff_s * 4.0 ** (len(recent) - 1)
        return min(backoff_s, self._policy.max_backoff_s)

    async def _stop(self) -> int:
        """Wait for the first signal, then drain; a second signal ends the drain."""
        await self._signals.get()
        self._stopping.set()
        self._observer.on_drain()
        drain = asyncio.create_task(self._drain())
        second = asyncio.create_task(self._signals.get())
        await asyncio.wait({drain, second}, return_when=asyncio.FIRST_COMPLETED)
        if second.done():
            drain.cancel()
            return 128 + second.result()
        second.cancel()
        return 0 if drain.result() else 1

    async def _drain(self) -> bool:
        """Drain the children in order; returns whether all exited by themselves with code 0."""
        is_clean = True
        for spec in self._specs:
            if child := self._children.get(spec.name):
                is_clean &= await child.drain(self._policy.drain_timeout_s + DRAIN_SLACK_S)
        return is_clean


class _SupervisedProcess:
    """One run of a supervised process, from start to exit."""

    def __init__(
        self,
        spec: ChildSpec,
        process: asyncio.subprocess.Process,
        line: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        observer: Observer,
        start_budget_s: float,
    ) -> None:
        self.spec = spec
        self.is_ready = False
        self.failure: TriptychError | None = None
        self.kept: dict[str, Any] = {}
        self.shared: dict[str, Any] = {}
        self._process = process
        self._reader, self._writer = line
        self._observer = observer
        self._hung = asyncio.Event()
        self._silence = SilenceTimer(LISTEN_INTERVAL_S)
        self._budget_s = start_budget_s
        self._watchdog = self._schedule_check()

    @classmethod
    async def start(
        cls, spec: ChildSpec, start_budget_s: float, observer: Observer
    ) -> _SupervisedProcess:
        """Start the process in its own process group and send it its configuration."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=theirs.fileno(),
                stderr=spec.stderr,
                pass_fds=spec.pass_fds,
                env=spec.env,
                process_group=0,
            )
        line = await asyncio.open_connection(sock=ours)
        child = cls(spec, process, line, observer, start_budget_s)
        child._write(spec.config + b"\n")
        return child

    async def run(self) -> str:
        """Wait for the process to end, killing it if it hangs; returns how it ended."""
        listener = asyncio.create_task(self._listen())
        exited = asyncio.create_task(self._process.wait())
        hung = asyncio.create_task(self._hung.wait())
        try:
            await asyncio.wait({exited, hung}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                await self._dump_and_kill()
            code = await exited
            with suppress(TimeoutError):
                await asyncio.wait_for(listener, 1)  # its last messages
        finally:
            self.kill()  # includes subprocesses of the process
            await self._process.wait()
            self._watchdog.cancel()
            for task in (listener, exited, hung):
                task.cancel()
            self._writer.close()
        return "hung" if self._hung.is_set() else _describe(code)

    async def drain(self, timeout_s: float) -> bool:
        """Ask the child to drain and wait; returns whether it exited by itself with code 0."""
        self._write(DRAIN)
        with suppress(TimeoutError):
            return await asyncio.wait_for(self._process.wait(), timeout_s) == 0
        _log.warning("the %s process did not drain in %.0f s", self.spec.name, timeout_s)
        self.kill()
        return False

    def kill(self) -> None:
        """Kill the process and its group at once; does nothing if they are gone."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self, line: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(line)

    async def _listen(self) -> None:
        decoder = msgspec.json.Decoder(FromChild)
        with suppress(ConnectionError):
            while line := await self._reader.readline():
                try:
                    self._take(decoder.decode(line))
                except msgspec.MsgspecError:
                    _log.warning("the %s process sent a malformed message", self.spec.name)

    def _take(self, note: FromChild) -> None:
        if isinstance(note, Beat):
            self._silence.reset()
            self._budget_s = note.stall_budget_s
        elif isinstance(note, Ready):
            self.is_ready = True
        elif isinstance(note, StartFacts):
            if note.is_shared:
                self.shared.update(note.fields)
            else:
                self.kept = note.fields
        elif isinstance(note, Failed):
            self.failure = from_info(ErrorInfo(code=note.code, message=note.message))
        self._observer.on_note(self.spec.name, note)

    def _schedule_check(self) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_later(self._silence.interval_s, self._check_silence)

    def _check_silence(self) -> None:
        self._silence.tick()
        if self._silence.elapsed_s > self._budget_s:
            self._hung.set()
        else:
            self._watchdog = self._schedule_check()

    async def _dump_and_kill(self) -> None:
        _log.error("the %s process makes no progress; its stacks follow", self.spec.name)
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        await asyncio.sleep(DUMP_TIME_S)
        self.kill()


def _describe(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
