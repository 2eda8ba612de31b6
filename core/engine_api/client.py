"""The interface to the engine, in process or across a socket.

Owns the client protocol. `schedulers.local.LocalClient` runs the engine on a thread of this
process; `core.transport.remote.RemoteClient` talks to an engine process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from triptych.core.engine_api.job import Output
from triptych.core.engine_api.journal import JobJournal
from triptych.core.engine_api.model_changes import ModelChange
from triptych.core.engine_api.reports import Heartbeat, ModelStatus
from triptych.core.engine_api.step_feed import StepSink


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """The engine's state as its client sees it. `beat_age_s` is the time since its last heartbeat.

    With replicas this combines all of them: `num_replicas` are ready, and `by_replica` has the
    heartbeat of each.
    """

    is_ready: bool
    is_alive: bool
    is_draining: bool
    beat_age_s: float
    num_restarts: int
    models: tuple[ModelStatus, ...]
    last_beat: Heartbeat | None
    reason: str = ""
    num_replicas: int = 1
    by_replica: Mapping[str, Heartbeat] = field(default_factory=dict)


def reduced_context(status: EngineStatus, model: str) -> int:
    """The context of a model whose own does not fit into the engine's memory; 0 elsewhere."""
    return next((each.reduced_context for each in status.models if each.model == model), 0)


class OutputStream(Protocol):
    """A job's outputs, in order. Ends after the final one; `aclose` before that cancels."""

    def __aiter__(self) -> AsyncIterator[Output]:
        """Return the stream itself."""

    async def __anext__(self) -> Output:
        """Wait for the next output; raises the error that ended the job, if any."""

    async def aclose(self) -> None:
        """Stop following the job, and cancel it if it still runs."""


class EngineClient(Protocol):
    """Submit jobs and follow them. Safe to use from one asyncio loop."""

    @property
    def journal(self) -> JobJournal:
        """The recent jobs."""

    def submit(
        self,
        model: str,
        request: Any,
        *,
        job_id: str,
        deadline_s: float | None = None,
        client: str = "",
    ) -> OutputStream:
        """Run one job of `client`; iterate its outputs until the final one.

        Errors arrive as exceptions of `core.errors`. Closing the iterator early (`aclose`)
        cancels the job. A reader that falls behind by more than the stream's bound pauses its
        job, and after `stream_timeout_s` fails it with `SlowReader`.
        """

    def status(self) -> EngineStatus:
        """The last known state; never blocks."""

    async def load(self, model: str) -> None:
        """Load a configured model and wait until it is ready; raises the error of loading."""

    async def unload(self, model: str) -> None:
        """Ask the engine to unload a model as soon as no job needs it; jobs are never ended."""

    async def change(self, change: ModelChange) -> None:
        """Change the models while the engine runs; raises the error that prevented it.

        With replicas only `LoadModel` and `UnloadModel` are offered.
        """

    def watch(self, sink: StepSink) -> Callable[[], None]:
        """Pass every step report to `sink` until the returned function is called.

        Stays in force across engine restarts. Steps are only recorded while there is a watcher.
        """

    async def close(self) -> None:
        """Disconnect from the engine (an in-process one is stopped)."""
