"""The engine on a thread of this process, behind the client's interface.

Owns the thread and the delivery of its outputs to one asyncio loop. For the Python pipeline and
tests; a server runs its engine in a separate process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from triptych.core.engine_api.client import EngineStatus
from triptych.core.engine_api.job import Job, Output
from triptych.core.engine_api.journal import JobJournal
from triptych.core.engine_api.model_changes import LoadModel, ModelChange, UnloadModel
from triptych.core.engine_api.reports import Heartbeat
from triptych.core.engine_api.step_feed import StepFeed, StepSink
from triptych.core.engine_api.streams import JobStream, StreamTable
from triptych.core.errors import EngineDown, TriptychError
from triptych.schedulers.engine import EngineCore

_log = logging.getLogger(__name__)


class LocalClient:
    """Runs `engine` from now until `close` (`core.engine_api.client.EngineClient`).

    Belongs to the asyncio loop that first submits or loads.
    """

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._streams = StreamTable(
            on_cancel=engine.cancel,
            on_pause=engine.set_paused,
            stream_timeout_s=engine.config.server.stream_timeout_s,
        )
        self._feed = StepFeed(engine.watch)
        self._outbox: deque[Output] = deque()
        self._is_collecting = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changes: set[asyncio.Future[None]] = set()
        self._last_beat: Heartbeat | None = None
        self._last_beat_s = engine.clock()
        self._final_error: TriptychError | None = None
        engine.on_beat = self._on_beat
        engine.on_turn = self._flush
        engine.on_steps = lambda report: self._call(self._feed.deliver, report)
        self._thread = threading.Thread(target=self._run, name="triptych-engine", daemon=True)
        self._thread.start()

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
        """Run one job; iterate its outputs. Raises `EngineDown` if the engine is gone."""
        self._bind()
        stream = self._streams.open(job_id, model)
        if self._final_error is not None:
            self._streams.fail(job_id, self._final_error)
            return stream
        self._engine.submit(
            Job(
                job_id=job_id,
                model=model,
                request=request,
                sink=self._put,
                arrival_s=self._engine.clock(),
                limit_s=deadline_s,
                client=client,
            )
        )
        return stream

    def status(self) -> EngineStatus:
        """The engine as of its last heartbeat."""
        beat = self._last_beat
        is_alive = self._thread.is_alive()
        models = beat.models if beat is not None else ()
        states = {status.state for status in models}
        is_draining = beat is not None and beat.phase == "drain"
        return EngineStatus(
            is_ready=is_alive and not is_draining and ("ready" in states or states == {"unloaded"}),
            is_alive=is_alive,
            is_draining=is_draining,
            beat_age_s=self._engine.clock() - self._last_beat_s,
            num_restarts=0,
            models=models,
            last_beat=beat,
            reason=self._final_error.message if self._final_error is not None else "",
        )

    async def unload(self, model: str) -> None:
        """Unload a model once no job needs it (`EngineClient.unload`)."""
        await self.change(UnloadModel(model))

    async def load(self, model: str) -> None:
        """Load a configured model and wait until it is ready; raises what loading raised."""
        await self.change(LoadModel(model))

    async def change(self, change: ModelChange) -> None:
        """Change the models (`EngineClient.change`)."""
        loop = self._bind()
        done: asyncio.Future[None] = loop.create_future()

        def conclude(error: TriptychError | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        self._changes.add(done)
        try:
            if self._final_error is not None:
                raise self._final_error
            self._engine.change(change, lambda error: self._call(conclude, error))
            await done
        finally:
            self._changes.discard(done)

    def watch(self, sink: StepSink) -> Callable[[], None]:
        """Pass every report of steps to `sink` (`EngineClient.watch`)."""
        self._bind()
        return self._feed.add(sink)

    async def close(self) -> None:
        """Stop the engine and wait for its thread."""
        self._engine.stop()
        await asyncio.to_thread(self._thread.join)
        self._fail_all()

    def _bind(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    # On the engine's thread.

    def _run(self) -> None:
        final_error: TriptychError = EngineDown("The engine was stopped.")
        try:
            self._engine.run()
        except TriptychError as error:
            final_error = error
        except Exception:  # reported as the end of the engine
            _log.exception("the engine crashed")
            final_error = EngineDown("The engine crashed; the log says why.")
        self._final_error = final_error
        self._call(self._fail_all)

    def _on_beat(self, beat: Heartbeat) -> None:
        self._last_beat, self._last_beat_s = beat, self._engine.clock()

    def _put(self, output: Output) -> None:
        self._outbox.append(output)

    def _flush(self) -> None:
        """Schedule the delivery of a turn's outputs once its steps are launched.

        Delivery takes the interpreter's lock, for which the launch would otherwise wait.
        """
        if self._outbox and not self._is_collecting:
            self._is_collecting = True
            self._call(self._collect)

    def _call(self, function: Any, *args: Any) -> None:
        if self._loop is None:
            return  # no request came yet
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop was closed before the client: no stream is left
            self._engine.stop()

    # On the asyncio loop.

    def _collect(self) -> None:
        self._is_collecting = False
        while self._outbox:
            self._streams.deliver(self._outbox.popleft())

    def _fail_all(self) -> None:
        """End all streams and changes: the engine has ended."""
        assert self._final_error is not None
        self._collect()
        self._streams.fail_all(self._final_error)
        for done in tuple(self._changes):
            if not done.done():
                done.set_exception(self._final_error)
