"""The API process's end of the socket: submit jobs, stream their outputs, track the engine's state.

Owns the socket, the engine's epochs and the latest heartbeat. `core.engine_api.streams` buffers a
job's outputs, whose meaning belongs to the modality.

An engine identifies itself by its epoch, its start time on the system's monotonic clock. A later
epoch replaces an earlier one, and messages from a replaced or dead engine are ignored. Jobs that
arrive before the first engine wait for it; after that, jobs without an engine fail at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
from msgspec import structs

from triptych.core.engine_api.client import EngineStatus
from triptych.core.engine_api.job import Job, Output
from triptych.core.engine_api.journal import JobJournal
from triptych.core.engine_api.model_changes import (
    KeptChanges,
    LoadModel,
    ModelChange,
    RemoveModel,
    UnloadModel,
)
from triptych.core.engine_api.reports import ASLEEP, Heartbeat, StepReport
from triptych.core.engine_api.step_feed import StepFeed, StepSink
from triptych.core.engine_api.streams import JobStream, StreamTable
from triptych.core.engine_api.totals import RunningTotals
from triptych.core.errors import Draining, EngineDown, PayloadTooLarge, TriptychError, from_info
from triptych.core.transport.endpoint import bind_router
from triptych.core.transport.messages import (
    MAX_MESSAGE_BYTES,
    Cancel,
    Change,
    Changed,
    EngineGone,
    FromEngine,
    Goodbye,
    Hello,
    MessageCodec,
    Outputs,
    SetPaused,
    ToEngine,
    Watch,
)
from triptych.core.transport.silence_timer import SilenceTimer

ENGINE = b"engine-"
SUPERVISOR = b"supervisor"
CHECK_INTERVAL_S = 0.25
FIRST_ENGINE_WAIT_S = 60.0
"""How long after its start an API process queues jobs for the first engine."""

USUAL_START_S = 5.0
"""The assumed length of an engine's start, before one was measured or when it takes longer."""

_MAX_MESSAGES_PER_TURN = 256
_log = logging.getLogger(__name__)


def engine_identity(epoch_ns: int) -> bytes:
    """The socket identity of the engine of this epoch."""
    return ENGINE + str(epoch_ns).encode()


class RemoteClient:
    """`EngineClient` over a socket. Created, used and closed on one asyncio loop."""

    def __init__(self, folder: Path, codec: MessageCodec, *, stream_timeout_s: float) -> None:
        self.on_crash: Callable[[str], None] = lambda reason: None
        """Called with the reason after the engine has crashed."""
        self.on_kept: Callable[[Sequence[ModelChange]], None] = lambda changes: None
        """Called with all changes to make in later engines, after each new one."""
        self._codec = codec
        self._loop = asyncio.get_running_loop()
        self._streams = StreamTable(
            on_cancel=self._cancel,
            on_pause=self._set_paused,
            stream_timeout_s=stream_timeout_s,
        )
        self._feed = StepFeed(lambda is_on: self._post(Watch(is_on)))
        self._epoch_ns: int | None = None
        self._dead_until_ns = 0
        self._num_engines = 0
        self._beat: Heartbeat | None = None
        self._totals = RunningTotals()
        self._beat_s = time.monotonic()
        self._silence = SilenceTimer(CHECK_INTERVAL_S)
        self._absence = "the engine is starting"
        self._is_warm = False
        self._was_cold = False
        """Whether a beat of this engine arrived while it was still loading models."""
        self._start_begins_s = time.monotonic()
        self._start_s = USUAL_START_S
        """How long the last start took, from process start to ready models."""
        self._waiting: dict[str, bytes] = {}
        self._first_engine_deadline_s = time.monotonic() + FIRST_ENGINE_WAIT_S
        self._changes: dict[int, tuple[ModelChange, asyncio.Future[None]]] = {}
        self._num_changes = 0
        self._kept = KeptChanges()
        self._socket = bind_router(folder)
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._next_check = self._loop.call_later(CHECK_INTERVAL_S, self._check_heartbeat)

    # -- called by clients ---------------------------------------------------------------------

    @property
    def journal(self) -> JobJournal:
        """The recent jobs; see `EngineClient`."""
        return self._streams.journal

    def submit(
        self,
        model: str,
        request: Any,
        *,
        job_id: str,
        deadline_s: float | None = None,
        client: str = "",
    ) -> JobStream:
        """Run one job (`EngineClient.submit`).

        The stream raises `EngineDown` without an engine (after a wait, for the first engine), and
        `PayloadTooLarge` if the request does not fit into one message.
        """
        stream = self._streams.open(job_id, model)
        if self._is_draining():
            self._streams.fail(job_id, Draining("The engine is shutting down."))
            return stream
        job = Job(job_id=job_id, model=model, request=request, limit_s=deadline_s, client=client)
        message = self._codec.encode(job)
        if len(message) > MAX_MESSAGE_BYTES:
            mib, most = len(message) / 2**20, MAX_MESSAGE_BYTES >> 20
            error = PayloadTooLarge(
                f"The model's input takes {mib:.0f} MiB; the limit is {most} MiB per request. Send"
                " less, or split the input."
            )
            self._streams.fail(job_id, error)
        elif self._awaits_first() and self._has_room(message):
            self._waiting[job_id] = message
        elif not (self._is_alive() and self._send(message)):
            self._streams.fail(job_id, self._engine_down())
        return stream

    def status(self) -> EngineStatus:
        """The engine's state, from its last beat and the time since."""
        is_alive = self._is_alive()
        reason = self._why_not_ready() if is_alive else "the engine makes no progress"
        return EngineStatus(
            is_ready=not reason,
            is_alive=is_alive,
            is_draining=self._is_draining(),
            beat_age_s=time.monotonic() - self._beat_s,
            num_restarts=max(0, self._num_engines - 1),
            models=self._beat.models if self._beat else (),
            last_beat=self._beat,
            reason=reason,
        )

    async def load(self, model: str) -> None:
        """Load `model` and wait until it is ready; raises the loading error, or `EngineDown`."""
        await self.change(LoadModel(model))

    async def unload(self, model: str) -> None:
        """Unload `model` once no job needs it; raises `EngineDown`."""
        await self.change(UnloadModel(model))

    async def change(self, change: ModelChange) -> None:
        """Change the models (`EngineClient.change`). Engines that start later have them, too."""
        self._num_changes += 1
        call = self._num_changes
        if isinstance(change, RemoveModel):  # no engine, this one or a later one, refuses it
            self._kept.add(change)
        if not self._post(Change(change, call)):
            raise self._engine_down()
        done: asyncio.Future[None] = self._loop.create_future()
        self._changes[call] = change, done
        await done

    def keep(self, changes: Sequence[ModelChange]) -> None:
        """Make `changes`, which an earlier API process made, in every engine that starts."""
        for change in changes:
            self._kept.add(change)

    def watch(self, sink: StepSink) -> Callable[[], None]:
        """Pass every step report to `sink` (`EngineClient.watch`)."""
        return self._feed.add(sink)

    async def close(self) -> None:
        """End every stream and release the socket; the engine keeps running."""
        if self._socket.closed:
            return
        self._next_check.cancel()
        self._end_all(Draining("The server is shutting down."))
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _end_all(self, error: TriptychError) -> None:
        self._waiting.clear()
        self._streams.fail_all(error)
        for call in tuple(self._changes):
            self._end_change(call, error)

    def _cancel(self, job_ids: tuple[str, ...]) -> None:
        for job_id in job_ids:
            self._waiting.pop(job_id, None)
        self._post(Cancel(job_ids))

    def _set_paused(self, job_ids: tuple[str, ...], is_paused: bool) -> None:
        self._post(SetPaused(job_ids, is_paused))

    # -- the socket ----------------------------------------------------------------------------

    def _post(self, message: ToEngine) -> bool:
        return self._send(self._codec.encode(message))

    def _send(self, message: bytes) -> bool:
        """Send to the engine of the current epoch; false if there is none."""
        if self._epoch_ns is None:
            return False
        frames = [engine_identity(self._epoch_ns), message]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            _log.warning("the engine cannot be reached: %s", error)
            return False
        # The descriptor is edge-triggered, and sending may have consumed an edge.
        self._loop.call_soon(self._receive)
        return True

    def _receive(self) -> None:
        """Handle the messages that have arrived, at most `_MAX_MESSAGES_PER_TURN`."""
        if self._socket.closed:
            return
        for _ in range(_MAX_MESSAGES_PER_TURN):
            try:
                sender, *messages = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            for message in map(self._codec.from_engine, messages):
                if message is not None:
                    self._take(sender, message)
        self._loop.call_soon(self._receive)

    def _take(self, sender: bytes, message: FromEngine) -> None:
        if isinstance(message, EngineGone):
            if sender == SUPERVISOR:
                reason = f"the engine {message.reason}"
                self._retire(message.at_ns, reason, message.restart_in_s)
                self.on_crash(reason)
            return
        epoch_ns = _parse_epoch(sender)
        if epoch_ns is None or not self._enter_epoch(epoch_ns):
            return
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._streams.deliver(output if output.error is None else self._with_retry(output))
        elif isinstance(message, Heartbeat):
            self._take_beat(message)
        elif isinstance(message, StepReport):
            self._feed.deliver(message)
        elif isinstance(message, Changed):
            self._end_change(message.call, from_info(message.error) if message.error else None)
        elif isinstance(message, Goodbye):
            self._retire(epoch_ns, "the engine has shut down", None)

    def _take_beat(self, beat: Heartbeat) -> None:
        self._beat, self._beat_s = self._totals.add(beat), time.monotonic()
        self._silence.reset()
        # Models that load later, on first use, do not make the server unready.
        is_cold = not self._is_warm and "loading" in {status.state for status in beat.models}
        if not (self._is_warm or is_cold) and self._was_cold:
            self._start_s = self._beat_s - self._start_begins_s
        self._is_warm, self._was_cold = not is_cold, is_cold

    def _end_change(self, call: int, error: TriptychError | None) -> None:
        if call not in self._changes:
            return
        change, done = self._changes.pop(call)
        if error is None:
            self._kept.add(change)
            self.on_kept(self._kept.changes())
        if done.done():  # no call waits for it any more
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    # -- epochs --------------------------------------------------------------------------------

    def _enter_epoch(self, epoch_ns: int) -> bool:
        """Whether `epoch_ns` is the current engine's epoch; a newer one becomes current."""
        if self._epoch_ns == epoch_ns:
            return True
        if epoch_ns <= max(self._dead_until_ns, self._epoch_ns or 0):
            return False
        if self._epoch_ns is not None:
            self._retire(self._epoch_ns, "the engine was replaced", 0.0)
            self.on_crash("the engine was replaced")
        self._epoch_ns = epoch_ns
        self._num_engines += 1
        self._send_hello()
        for change in self._kept.changes():  # before the jobs that need them
            self._post(Change(change))
        waiting, self._waiting = self._waiting, {}
        for job_id, message in waiting.items():
            if not self._send(message):
                self._streams.fail(job_id, self._engine_down())
        return True

    def _send_hello(self) -> None:
        """Make the engine cancel all earlier jobs; restore the watchers' step reports."""
        self._post(Hello())
        self._feed.resume()

    def _awaits_first(self) -> bool:
        """Whether the first engine is still awaited."""
        is_first = not self._num_engines and not self._dead_until_ns
        return is_first and time.monotonic() < self._first_engine_deadline_s

    def _has_room(self, message: bytes) -> bool:
        return sum(map(len, self._waiting.values())) + len(message) <= MAX_MESSAGE_BYTES

    def _retire(self, at_ns: int, reason: str, restart_in_s: float | None) -> None:
        """Treat engines started up to `at_ns` as dead: end their jobs, ignore their messages."""
        self._dead_until_ns = max(self._dead_until_ns, at_ns)
        if self._epoch_ns is not None and self._epoch_ns > at_ns:
            return
        self._epoch_ns, self._beat, self._beat_s = None, None, time.monotonic()
        self._totals.restart()
        self._is_warm = self._was_cold = False
        self._start_begins_s = self._beat_s + (restart_in_s or 0.0)
        self._absence = reason
        self._end_all(self._engine_down())

    def _why_not_ready(self) -> str:
        if self._beat is None:
            return self._absence
        if self._is_draining():
            return "the engine is shutting down"
        if not self._is_warm:
            return "models are being loaded"
        if self._beat.phase == ASLEEP:
            return "the server is asleep: POST /wake_up wakes it"
        if {status.state for status in self._beat.models} == {"failed"}:
            return "no model could be loaded"
        return ""

    def _is_draining(self) -> bool:
        return self._beat is not None and self._beat.phase == "drain"

    def _is_alive(self) -> bool:
        """False only for an engine that hangs: an absent one is restarted by its supervisor."""
        if self._beat is None:
            return True
        return self._silence.elapsed_s <= self._beat.stall_budget_s

    def _check_heartbeat(self) -> None:
        """End all streams if the engine is silent for longer than its last heartbeat allows."""
        self._next_check = self._loop.call_later(CHECK_INTERVAL_S, self._check_heartbeat)
        self._receive()
        self._silence.tick()
        if self._waiting and not self._awaits_first():
            self._end_all(self._engine_down())
        if len(self._streams) and not self._is_alive():
            self._streams.fail_all(
                EngineDown("The engine makes no progress.", retry_after_s=self._start_s)
            )
            self._send_hello()  # in case it recovers: those jobs have no reader any more

    def _with_retry(self, output: Output) -> Output:
        """Add the expected start time to an `EngineDown` of the engine, which does not know it."""
        error = output.error
        if error is None or error.code != EngineDown.code:
            return output
        return structs.replace(output, error=structs.replace(error, retry_after_s=self._start_s))

    def _engine_down(self) -> TriptychError:
        left_s = self._start_begins_s + self._start_s - time.monotonic()
        return EngineDown(
            f"{self._absence[:1].upper()}{self._absence[1:]}; try again shortly.",
            retry_after_s=left_s if left_s > 0 else USUAL_START_S,
        )


def _parse_epoch(sender: bytes) -> int | None:
    digits = sender.removeprefix(ENGINE)
    if digits == sender or not digits.isdigit() or len(digits) > 20:
        return None
    return int(digits)
