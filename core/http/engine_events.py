"""`/v1/engine/events`: the engine's activity as a stream of events.

Owns the format of the events and each reader's buffer. Like `/metrics`, events describe the server
as a whole and contain nothing of a single request or caller.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from triptych.core.engine_api.client import EngineClient, EngineStatus
from triptych.core.engine_api.reports import (
    Heartbeat,
    ModelStatus,
    RunningStep,
    StepRecord,
    StepReport,
)
from triptych.core.errors import Overloaded
from triptych.core.http.body import read_body
from triptych.core.http.context import Context
from triptych.core.http.disconnect import InFlight
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.http.models import ModelCard
from triptych.core.http.sse import EventStream, described
from triptych.core.process.metrics import (
    DEVICE_BUDGET,
    DEVICE_BYTES,
    DEVICE_INFO,
    labelled_series,
    series,
)

INTERVAL_S = 0.25
MAX_READERS = 32
"""Readers per API key."""
MAX_BUFFERED = 4096


class EngineStarted(BaseModel):
    """The engine has started. `now_s` is the system's monotonic clock, as in all events."""

    type: Literal["engine.started"]
    now_s: float
    num_restarts: int
    device: str


class EngineStopped(BaseModel):
    """The engine has stopped or makes no progress; it may be restarted."""

    type: Literal["engine.stopped"]
    now_s: float
    reason: str


class OwnedMemory(BaseModel):
    """Device memory of one owner."""

    owner: str
    num_bytes: int


class DeviceMemory(BaseModel):
    """The memory budget of all models, and its use by owner."""

    budget_bytes: int
    owners: list[OwnedMemory]


class CachePages(BaseModel):
    """A model's KV cache: pages in use, and pages kept for prompts with the same prefix."""

    num_pages: int
    num_used: int
    num_cached: int


class ModelActivity(BaseModel):
    """The state of a model and its queue."""

    model: str
    task: str
    state: str
    progress: float
    num_waiting: int
    num_running: int
    pages: CachePages | None


class EngineState(BaseModel):
    """The current state of the engine."""

    type: Literal["engine.state"]
    now_s: float
    is_ready: bool
    num_jobs: int
    memory: DeviceMemory
    models: list[ModelActivity]


class FinishedStep(BaseModel):
    """A step, or `num_steps` short steps of one kind; for `busy_s` the device's only work."""

    model: str
    task: str
    kind: str
    num_rows: int
    start_s: float
    length_s: float
    num_steps: int
    busy_s: float
    is_failed: bool


class StepInProgress(BaseModel):
    """The step that the device is running."""

    model: str
    task: str
    kind: str
    start_s: float


class EngineSteps(BaseModel):
    """Steps since the previous event, without the oldest `num_dropped`, and the running step."""

    type: Literal["engine.steps"]
    now_s: float
    steps: list[FinishedStep]
    running: StepInProgress | None
    num_dropped: int


class _StepBuffer:
    """Steps that one reader has not received yet."""

    def __init__(self, cards: Mapping[str, ModelCard]) -> None:
        self._cards = cards
        self._steps: deque[StepRecord] = deque()
        self._latest: StepReport | None = None
        self._num_dropped = 0

    def take(self, report: StepReport) -> None:
        """Buffer a report; when full, the oldest steps are dropped."""
        self._latest = report
        self._num_dropped += report.num_dropped
        self._steps.extend(report.steps)
        while len(self._steps) > MAX_BUFFERED:
            self._num_dropped += self._steps.popleft().num_steps

    def event(self, now_s: float) -> EngineSteps | None:
        """Return the buffered steps as one event; `None` if there was no report."""
        latest, self._latest = self._latest, None
        if latest is None:
            return None
        event = EngineSteps(
            type="engine.steps",
            now_s=now_s,
            steps=[self._finished(step) for step in self._steps],
            running=self._in_progress(latest.running),
            num_dropped=self._num_dropped,
        )
        self._steps.clear()
        self._num_dropped = 0
        return event

    def _task_of(self, model: str) -> str:
        return self._cards[model].task if model in self._cards else ""

    def _in_progress(self, step: RunningStep | None) -> StepInProgress | None:
        if step is None:
            return None
        return StepInProgress(
            model=step.model,
            task=self._task_of(step.model),
            kind=step.kind,
            start_s=_moment(step.start_s),
        )

    def _finished(self, step: StepRecord) -> FinishedStep:
        return FinishedStep(
            model=step.model,
            task=self._task_of(step.model),
            kind=step.kind,
            num_rows=step.num_rows,
            start_s=_moment(step.start_s),
            length_s=_moment(step.length_s),
            num_steps=step.num_steps,
            busy_s=_moment(step.busy_s),
            is_failed=step.is_failed,
        )


class EngineEvents:
    """Source of the streams. Reads the engine's state from its last heartbeat.

    `cards` may change while streams are open.
    """

    def __init__(
        self,
        client: EngineClient,
        cards: Mapping[str, ModelCard],
        in_flight: InFlight,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._cards = cards
        self._in_flight = in_flight
        self._clock = clock
        self._num_readers: Counter[str] = Counter()

    def open(self, owner: str) -> AsyncGenerator[BaseModel, None]:
        """Open a stream for a reader. Raises `Overloaded` if its owner has too many."""
        if self._num_readers[owner] >= MAX_READERS:
            raise Overloaded(
                f"You already have {MAX_READERS} streams of engine events open; close one.",
                retry_after_s=10.0,
            )
        return self._follow(owner)

    async def _follow(self, owner: str) -> AsyncGenerator[BaseModel, None]:
        buffer = _StepBuffer(self._cards)
        leave = self._client.watch(buffer.take)
        known: int | str | None = None
        self._num_readers[owner] += 1
        try:
            while not self._in_flight.is_draining:
                known, news = self._news(known)
                for event in news:
                    yield event
                if (steps := buffer.event(self._now_s())) is not None:
                    yield steps
                await asyncio.sleep(INTERVAL_S)
        finally:
            leave()
            self._num_readers[owner] -= 1

    def _news(self, known: int | str | None) -> tuple[int | str, list[BaseModel]]:
        """Return start, stop and state events, and the engine's identity for the next call.

        `known` is the identity of the previous call: the number of restarts, or the reason why the
        engine is down.
        """
        status = self._client.status()
        beat = status.last_beat
        if beat is None or not status.is_alive:
            reason = status.reason or "there is no engine yet"
            stopped = EngineStopped(type="engine.stopped", now_s=self._now_s(), reason=reason)
            return reason, [] if known == reason else [stopped]
        events: list[BaseModel] = []
        if known != status.num_restarts:
            started = EngineStarted(
                type="engine.started",
                now_s=self._now_s(),
                num_restarts=status.num_restarts,
                device=_device(beat),
            )
            events.append(started)
        return status.num_restarts, [*events, self._state(status, beat)]

    def _state(self, status: EngineStatus, beat: Heartbeat) -> EngineState:
        states = {each.model: each for each in beat.models}
        return EngineState(
            type="engine.state",
            now_s=self._now_s(),
            is_ready=status.is_ready,
            num_jobs=beat.num_jobs,
            memory=_memory(beat),
            models=[
                _activity(states[model], card.task, beat)
                for model, card in self._cards.items()
                if model in states
            ],
        )

    def _now_s(self) -> float:
        return _moment(self._clock())


def _activity(status: ModelStatus, task: str, beat: Heartbeat) -> ModelActivity:
    def gauge(name: str) -> int:
        return int(beat.gauges.get(series(f"triptych_{name}", model=status.model), 0))

    pages = CachePages(
        num_pages=gauge("kv_pages"),
        num_used=gauge("kv_pages_leased"),
        num_cached=gauge("kv_pages_cached"),
    )
    return ModelActivity(
        model=status.model,
        task=task,
        state=status.state,
        progress=status.progress,
        num_waiting=gauge("jobs_waiting"),
        num_running=gauge("jobs_running"),
        pages=pages if pages.num_pages else None,
    )


def _memory(beat: Heartbeat) -> DeviceMemory:
    owners = [
        OwnedMemory(owner=labels["owner"], num_bytes=int(value))
        for labels, value in labelled_series(beat.gauges, DEVICE_BYTES)
    ]
    budget_bytes = int(beat.gauges.get(DEVICE_BUDGET, 0))
    return DeviceMemory(budget_bytes=budget_bytes, owners=owners)


def _device(beat: Heartbeat) -> str:
    return next((labels["device"] for labels, _ in labelled_series(beat.gauges, DEVICE_INFO)), "")


def _moment(seconds: float) -> float:
    """Round seconds to microseconds, the precision of the clock."""
    return round(seconds, 6)


def engine_events_router(events: EngineEvents) -> APIRouter:
    """Create the route `/v1/engine/events`."""
    router = APIRouter(responses=ERROR_RESPONSES, tags=["engine"])
    answer: dict[str, Any] = {
        "description": "Events until the client disconnects.",
        "content": described(EngineStarted, EngineStopped, EngineState, EngineSteps),
    }

    @router.get("/v1/engine/events", response_class=Response, responses={200: answer})
    async def follow_engine(request: Request) -> EventStream:
        """Stream the engine's state and steps."""
        options = request.app.state.options
        await read_body(request, options.max_request_bytes)  # then disconnects are noticed
        request.state.watcher.lift_limit()
        stream = events.open(Context.of(request).principal.owner)
        return EventStream(stream, heartbeat_s=options.heartbeat_s, end=b"", is_named=True)

    return router
