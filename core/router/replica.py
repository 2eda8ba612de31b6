"""The replica's side of the router: runs encoded jobs and reports the engine's status.

Owns the translation between encoded `Job` and `Outputs` messages and an `EngineClient`, which runs
the engine. Knows nothing of the transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from triptych.core.engine_api.client import EngineClient, EngineStatus
from triptych.core.engine_api.job import Job, Output
from triptych.core.engine_api.reports import Heartbeat, StepReport
from triptych.core.errors import EngineDown, TriptychError, to_info
from triptych.core.router.beats import ReplicaBeat
from triptych.core.router.report import LoadReport
from triptych.core.transport.messages import MessageCodec, Outputs

_WATCHED_S = 5.0
"""How long steps are recorded after the last request for them."""
_MAX_REPORTS = 256


class Replica:
    """One replica: an engine with a name. `end_process` is called if the engine is gone."""

    def __init__(
        self,
        name: str,
        client: EngineClient,
        codec: MessageCodec,
        *,
        page_size: int,
        end_process: Callable[[], object],
    ) -> None:
        self._name = name
        self._client = client
        self._codec = codec
        self._page_size = page_size
        self._end_process = end_process
        self._encode = msgspec.msgpack.Encoder().encode
        self._steps: list[StepReport] = []
        self._overdue: Heartbeat | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._leave: Callable[[], None] = lambda: None

    async def run(self, message: bytes, *, is_watching: bool) -> AsyncGenerator[bytes, None]:
        """Run a `Job` and yield `Outputs` of one each. Closing the generator cancels the job.

        If `is_watching`, its steps are recorded from the first one on. A replica without an engine
        ends its process: it would refuse jobs faster than others finish them, and so get all jobs
        until its next health check.
        """
        if not self._client.status().is_alive:
            self._end_process()
        if is_watching:
            self._watch()
        job = self._codec.to_engine(message)
        assert isinstance(job, Job), "the ingress sends jobs here"
        job_id = job.job_id
        stream = self._client.submit(
            job.model, job.request, job_id=job_id, deadline_s=job.limit_s, client=job.client
        )
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    yield self._codec.encode(Outputs((output,)))
        except TriptychError as error:
            failed = Output(job_id=job_id, is_final=True, error=to_info(error))
            yield self._codec.encode(Outputs((failed,)))

    def beat(self, *, is_watching: bool) -> bytes:
        """Encode a `ReplicaBeat`; if `is_watching`, with the steps since the last one."""
        if is_watching:
            self._watch()
        steps, self._steps = tuple(self._steps), []
        return self._encode(ReplicaBeat.of(self._name, self._client.status(), steps))

    def load_report(self) -> LoadReport:
        """Return the load for the router."""
        beat = self._client.status().last_beat
        return LoadReport() if beat is None else LoadReport.of(beat, self._page_size)

    async def load(self, model: str) -> None:
        """Load a model; raises the errors of loading."""
        await self._client.load(model)

    async def unload(self, model: str) -> None:
        """Unload a model once no job needs it."""
        await self._client.unload(model)

    def check(self) -> None:
        """Raise `EngineDown` if this replica must be replaced."""
        status = self._client.status()
        before, self._overdue = self._overdue, self._overdue_beat(status)
        # The same beat twice: this process has run since, and the engine has not.
        is_hung = self._overdue is not None and self._overdue is before
        if not status.is_alive or is_hung:
            raise EngineDown(status.reason or "The engine makes no progress.")

    @staticmethod
    def _overdue_beat(status: EngineStatus) -> Heartbeat | None:
        """Return the engine's last beat if the next one is overdue."""
        beat = status.last_beat
        is_overdue = beat is not None and status.beat_age_s > beat.stall_budget_s
        return beat if is_overdue else None

    async def close(self) -> None:
        """Stop the replica's engine."""
        await self._client.close()

    def _watch(self) -> None:
        """Record steps until `_WATCHED_S` after the last call."""
        if self._expiry is not None:
            self._expiry.cancel()
        else:
            self._leave = self._client.watch(self._note)
        self._expiry = asyncio.get_running_loop().call_later(_WATCHED_S, self._unwatch)

    def _unwatch(self) -> None:
        self._expiry = None
        self._leave()

    def _note(self, report: StepReport) -> None:
        if len(self._steps) < _MAX_REPORTS:
            self._steps.append(report)
