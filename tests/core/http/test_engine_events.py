"""The stream of engine events: what it reports, to which clients, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from support.engine_events import PATH, following, next_of
from support.http import READY, FakeEngine, in_process, live, make_app, until
from triptych.core.engine_api.client import EngineStatus
from triptych.core.engine_api.reports import (
    Heartbeat,
    ModelStatus,
    RunningStep,
    StepRecord,
    StepReport,
)
from triptych.core.engine_api.step_feed import StepFeed, StepSink
from triptych.core.errors import Overloaded
from triptych.core.http import engine_events
from triptych.core.http.disconnect import InFlight
from triptych.core.http.models import ModelCard
from triptych.core.process.metrics import DEVICE_BUDGET, DEVICE_BYTES, DEVICE_INFO, series

GAUGES = {
    DEVICE_BUDGET: 1000,
    series(DEVICE_INFO, device="cpu"): 1,
    series(DEVICE_BYTES, owner="tiny/weights"): 600,
    series(DEVICE_BYTES, owner='odd "name"/kv'): 50,
    series("triptych_jobs_waiting", model="tiny"): 2,
    series("triptych_jobs_running", model="tiny"): 3,
    series("triptych_kv_pages", model="tiny"): 64,
    series("triptych_kv_pages_leased", model="tiny"): 7,
    series("triptych_kv_pages_cached", model="tiny"): 9,
}
BEAT = Heartbeat(
    turn=1,
    phase="step",
    stall_budget_s=30.0,
    num_jobs=5,
    models=(ModelStatus(model="tiny", state="ready", progress=1.0),),
    gauges=GAUGES,
    counters={},
    histograms={},
)
STEP = StepRecord(
    model="tiny",
    kind="decode",
    num_rows=6,
    start_s=5.0,
    length_s=0.05,
    busy_s=0.03,
    num_steps=3,
)


@dataclass
class WatchedEngine(FakeEngine):
    """An engine client whose reports the test makes."""

    state: EngineStatus = field(default_factory=lambda: replace(READY, last_beat=BEAT))
    switched: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.feed = StepFeed(self.switched.append)

    def watch(self, sink: StepSink) -> Callable[[], None]:
        return self.feed.add(sink)


@pytest.fixture
def engine() -> WatchedEngine:
    return WatchedEngine()


@pytest.fixture
def app(tmp_path: Path, engine: WatchedEngine) -> FastAPI:
    return make_app(tmp_path, engine)


def test_state_and_steps_are_reported(app: FastAPI, engine: WatchedEngine) -> None:
    with live(app) as server, following(server.url) as events:
        started = next(events)
        assert started == {
            "type": "engine.started",
            "now_s": started["now_s"],
            "num_restarts": 0,
            "device": "cpu",
        }
        assert abs(started["now_s"] - time.monotonic()) < 60
        state = next(events)
        assert state == {
            "type": "engine.state",
            "now_s": state["now_s"],
            "is_ready": True,
            "num_jobs": 5,
            "memory": {
                "budget_bytes": 1000,
                "owners": [
                    {"owner": "tiny/weights", "num_bytes": 600},
                    {"owner": 'odd "name"/kv', "num_bytes": 50},
                ],
            },
            "models": [
                {
                    "model": "tiny",
                    "task": "chat",
                    "state": "ready",
                    "progress": 1.0,
                    "num_waiting": 2,
                    "num_running": 3,
                    "pages": {"num_pages": 64, "num_used": 7, "num_cached": 9},
                }
            ],
        }
        running = RunningStep(model="tiny", kind="prefill", start_s=5.25)
        engine.feed.deliver(StepReport(steps=(STEP, STEP), running=running, num_dropped=4))
        steps = next_of(events, "steps")
        assert steps["num_dropped"] == 4
        assert steps["running"] == {
            "model": "tiny",
            "task": "chat",
            "kind": "prefill",
            "start_s": 5.25,
        }
        assert steps["steps"] == 2 * [
            {
                "model": "tiny",
                "task": "chat",
                "kind": "decode",
                "num_rows": 6,
                "start_s": 5.0,
                "length_s": 0.05,
                "num_steps": 3,
                "busy_s": 0.03,
                "is_failed": False,
            }
        ]
        engine.feed.deliver(StepReport())
        assert next_of(events, "steps")["running"] is None


def test_steps_are_recorded_while_there_are_readers(app: FastAPI, engine: WatchedEngine) -> None:
    with live(app) as server:
        assert engine.switched == []
        with following(server.url) as events, following(server.url) as others:
            next(events)
            next(others)
            assert engine.switched == [True]
        until(lambda: engine.switched == [True, False])


def test_the_stream_goes_on_over_a_restart(app: FastAPI, engine: WatchedEngine) -> None:
    with live(app) as server, following(server.url) as events:
        assert next(events)["type"] == "engine.started"
        engine.state = replace(READY, is_ready=False, reason="the engine crashed")
        assert next_of(events, "stopped")["reason"] == "the engine crashed"
        engine.state = replace(READY, last_beat=BEAT, num_restarts=1)
        event = next(events)
        assert (event["type"], event["num_restarts"]) == ("engine.started", 1)
        assert next(events)["type"] == "engine.state"
        engine.state = replace(engine.state, num_restarts=2)  # too quick to be seen as gone
        assert next_of(events, "started")["num_restarts"] == 2
        engine.state = replace(engine.state, is_alive=False, reason="no progress")
        assert next_of(events, "stopped")["reason"] == "no progress"


def test_a_stream_may_begin_without_an_engine(app: FastAPI, engine: WatchedEngine) -> None:
    engine.state = replace(READY, is_ready=False, reason="")
    with live(app) as server, following(server.url) as events:
        event = next(events)
        assert event["type"] == "engine.stopped"
        assert event["reason"]


def test_a_slow_reader_loses_the_oldest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_events, "MAX_BUFFERED", 10)
    buffer = engine_events._StepBuffer({"tiny": ModelCard(id="tiny", task="chat")})
    for second in range(15):
        buffer.take(
            StepReport(steps=(msgspec.structs.replace(STEP, start_s=second),), num_dropped=1)
        )
    event = buffer.event(20.0)
    assert event is not None
    assert [step.start_s for step in event.steps] == list(range(5, 15))
    assert event.num_dropped == 15 + 5 * STEP.num_steps
    assert buffer.event(20.0) is None


async def test_readers_of_one_key_leave_room_for_another_s(
    tmp_path: Path, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_events, "MAX_READERS", 1)
    events = engine_events.EngineEvents(engine, {}, InFlight())
    first = events.open("alice")
    await anext(first)
    with pytest.raises(Overloaded):
        events.open("alice")
    async with aclosing(events.open("bob")) as other:
        await anext(other)
    await first.aclose()
    events.open("alice")


def test_too_many_readers_are_refused(
    app: FastAPI, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_events, "MAX_READERS", 1)
    with live(app) as server:
        with following(server.url) as events:
            next(events)
            refused = httpx.get(server.url + PATH)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        until(lambda: engine.switched == [True, False])
        with following(server.url) as events:
            next(events)


def test_the_stream_outlives_the_time_of_a_request_and_ends_with_the_server(
    tmp_path: Path, engine: WatchedEngine
) -> None:
    app = make_app(tmp_path, engine, request_timeout_s=0.3, drain_timeout_s=30.0)
    with live(app) as server, following(server.url) as events:
        for _ in range(4):  # a second
            next_of(events, "state")
        app.state.in_flight.draining.set()
        list(events)
        until(lambda: not len(app.state.in_flight))
    assert engine.switched == [True, False]


async def test_a_key_is_needed_and_head_does_not_wait(
    tmp_path: Path, engine: WatchedEngine
) -> None:
    app = make_app(tmp_path, engine, api_key=("right", "other"))
    async with in_process(app) as client:
        assert (await client.get(PATH)).status_code == 401
        head = await client.head(PATH, headers={"authorization": "Bearer other"})
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")
    assert engine.switched == []
