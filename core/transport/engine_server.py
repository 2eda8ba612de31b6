"""The engine process's end of the socket: passes requests to the engine and sends its outputs.

Owns the socket and its thread, so that the engine's loop never waits for a socket: the loop queues
messages, one batch of outputs per turn, and this thread encodes and sends them. Knows the engine
only through `EngineLoop`.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import zmq

from triptych.core.engine_api.job import Job, Output
from triptych.core.engine_api.model_changes import ModelChange
from triptych.core.engine_api.reports import Heartbeat, StepReport
from triptych.core.errors import TriptychError, to_info
from triptych.core.transport.endpoint import connect_dealer, send_if_connected
from triptych.core.transport.messages import (
    Cancel,
    Change,
    Changed,
    FromEngine,
    Goodbye,
    Hello,
    MessageCodec,
    Outputs,
    SetPaused,
    ToEngine,
    Watch,
)
from triptych.core.transport.remote import engine_identity

CLOSE_TIMEOUT_S = 3.0
"""How long the last messages may take to leave the process."""

_log = logging.getLogger(__name__)


class EngineLoop(Protocol):
    """The methods of `schedulers.engine.EngineCore` that the server calls; safe from any thread."""

    on_turn: Callable[[], None]
    on_steps: Callable[[StepReport], None]
    clock: Callable[[], float]

    def submit(self, job: Job) -> None:
        """Run a job."""

    def cancel(self, job_ids: Collection[str]) -> None:
        """End jobs early."""

    def set_paused(self, job_ids: Collection[str], is_paused: bool) -> None:
        """Pause or resume jobs."""

    def change(self, change: ModelChange, done: Callable[[TriptychError | None], None]) -> None:
        """Change the models; `done` is called on the loop's thread with the error, if any."""

    def watch(self, is_on: bool) -> None:
        """Start or stop reporting steps."""

    def drain(self) -> None:
        """Accept no new jobs, and end after the running ones."""


class EngineServer:
    """Connects `engine` to the API process. Set the engine's `on_beat` to `send_beat`."""

    def __init__(self, engine: EngineLoop, folder: Path, codec: MessageCodec) -> None:
        self._engine = engine
        self._codec = codec
        self._turn: list[Output] = []
        self._outbox: queue.SimpleQueue[FromEngine] = queue.SimpleQueue()
        self._open_jobs: set[str] = set()  # grows on the socket's thread, shrinks on the loop's
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._is_closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = connect_dealer(folder, engine_identity(time.monotonic_ns()), self._context)
        self._thread = threading.Thread(target=self._run, name="triptych-socket", daemon=True)
        engine.on_turn = self._send_turn
        engine.on_steps = self._post
        self._thread.start()

    def close(self, *, is_drained: bool) -> None:
        """Send the remaining messages and release the socket, after the engine's loop has ended.

        With `is_drained` it sends `Goodbye`; after a failure the supervisor sends `EngineGone`.
        """
        self._send_turn()
        if is_drained:
            self._post(Goodbye())
        self._is_closing = True
        self._wake()
        self._thread.join(2 * CLOSE_TIMEOUT_S)
        self._ours.close()
        self._theirs.close()

    # -- on the loop's thread ------------------------------------------------------------------

    def send_beat(self, beat: Heartbeat) -> None:
        """Send a heartbeat."""
        self._post(beat)

    def _put(self, output: Output) -> None:
        self._turn.append(output)
        if output.is_final:
            self._open_jobs.discard(output.job_id)

    def _send_turn(self) -> None:
        if self._turn:
            outputs = Outputs(tuple(self._turn))
            self._turn.clear()  # the list itself is the jobs' feed
            self._post(outputs)

    def _post(self, message: FromEngine) -> None:
        self._outbox.put(message)
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # full: a wake-up is already pending
            self._ours.send(b"\0", socket.MSG_DONTWAIT)

    # -- on the socket's thread ----------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._theirs, zmq.POLLIN)
        while not self._is_closing:
            ready = dict(poller.poll())
            if self._dealer in ready:
                self._receive_all()
            self._send_all()
        self._send_all()
        self._dealer.close(linger=int(CLOSE_TIMEOUT_S * 1000))
        self._context.term()  # `os._exit` comes next: wait until everything has been written

    def _send_all(self) -> None:
        with suppress(BlockingIOError):
            self._theirs.recv(4096)
        while not self._outbox.empty():
            for message in self._codec.encode_parts(self._outbox.get()):
                send_if_connected(self._dealer, message)

    def _receive_all(self) -> None:
        with suppress(zmq.Again):
            while True:
                message = self._codec.to_engine(self._dealer.recv(zmq.NOBLOCK))
                if message is not None:
                    self._take(message)

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Job):
            self._submit(message)
        elif isinstance(message, Cancel):
            self._engine.cancel(message.job_ids)
        elif isinstance(message, SetPaused):
            self._engine.set_paused(message.job_ids, message.is_paused)
        elif isinstance(message, Change):
            self._change(message)
        elif isinstance(message, Watch):
            self._engine.watch(message.is_on)
        elif isinstance(message, Hello):
            self._engine.cancel(tuple(self._open_jobs))
            self._engine.watch(False)

    def _submit(self, received: Job) -> None:
        """Run a received job. The engine's own fields are set here, never taken from the sender."""
        job = Job(
            job_id=received.job_id,
            model=received.model,
            request=received.request,
            limit_s=received.limit_s,
            client=received.client,
            sink=self._put,
            feed=self._turn.append,
            arrival_s=self._engine.clock(),
        )
        self._open_jobs.add(job.job_id)
        self._engine.submit(job)

    def _change(self, asked: Change) -> None:
        def done(error: TriptychError | None) -> None:
            self._post(Changed(call=asked.call, error=to_info(error) if error else None))

        self._engine.change(asked.change, done)
