"""What engine clients are, whose jobs a coroutine acts out instead of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from support.http import READY
from triptych.core.engine_api.client import EngineStatus
from triptych.core.engine_api.job import Output
from triptych.core.engine_api.journal import JobJournal
from triptych.core.engine_api.streams import HIGH_WATER, LOW_WATER, JobStream, StreamTable
from triptych.core.errors import to_info


@dataclass(kw_only=True)
class ScriptedEngine:
    """An engine client that remembers what became of every job."""

    error: Exception | None = None
    stream_timeout_s: float = 30.0
    high_water: int = HIGH_WATER
    low_water: int = LOW_WATER
    submitted: dict[str, Any] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.table = StreamTable(
            on_cancel=self._cancel,
            on_pause=self._pause,
            stream_timeout_s=self.stream_timeout_s,
            high_water=self.high_water,
            low_water=self.low_water,
        )

    async def act(self, job_id: str, request: Any) -> None:
        """Tell the deltas of a job; what this raises is its error."""
        raise NotImplementedError

    @property
    def journal(self) -> JobJournal:
        return self.table.journal

    @property
    def running(self) -> set[str]:
        return set(self.submitted) - {*self.finished, *self.cancelled}

    def submit(
        self,
        model: str,
        request: Any,
        *,
        job_id: str,
        deadline_s: float | None = None,
        client: str = "",
    ) -> JobStream:
        self.submitted[job_id] = request
        stream = self.table.open(job_id)
        self._tasks[job_id] = asyncio.create_task(self._run(job_id, request))
        return stream

    def send(self, job_id: str, delta: Any, *, is_final: bool = False) -> None:
        """Deliver a delta, the last of its job if `is_final`."""
        if is_final:
            self.finished.append(job_id)
        self.table.deliver(Output(job_id=job_id, payload=delta, is_final=is_final))

    async def _run(self, job_id: str, request: Any) -> None:
        try:
            await self.act(job_id, request)
        except Exception as error:
            self.finished.append(job_id)
            self.table.deliver(Output(job_id=job_id, error=to_info(error), is_final=True))
        finally:
            del self._tasks[job_id]

    def _cancel(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            self.cancelled.append(job_id)
            if task := self._tasks.get(job_id):
                task.cancel()

    def _pause(self, job_ids: Sequence[str], is_paused: bool) -> None:
        """A slow reader does not hold up the job."""

    def status(self) -> EngineStatus:
        return READY

    async def load(self, model: str) -> None: ...

    async def close(self) -> None: ...
