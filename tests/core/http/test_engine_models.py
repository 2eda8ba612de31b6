"""Models in memory: who sees them, and who may unload one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from support.http import READY, FakeEngine, in_process, make_app
from triptych.core.engine_api.reports import Heartbeat, ModelStatus
from triptych.core.errors import ErrorInfo, WeightsError, to_info
from triptych.core.process.metrics import DEVICE_BYTES, series

STATE = replace(
    READY,
    models=(
        ModelStatus(model="tiny", state="ready", progress=1.0, idle_s=3.21, num_loads=2),
        ModelStatus(
            model="big", state="failed", error=ErrorInfo(code="x", message="It does not fit.")
        ),
    ),
    last_beat=Heartbeat(
        turn=1,
        phase="idle",
        stall_budget_s=1.0,
        num_jobs=0,
        models=(),
        gauges={
            series(DEVICE_BYTES, owner="tiny/weights"): 30.0,
            series(DEVICE_BYTES, owner="tiny/kv"): 12.0,
            series(DEVICE_BYTES, owner="tiny2/kv"): 99.0,
            series(DEVICE_BYTES, owner="tiny/other/kv"): 77.0,
        },
        counters={},
        histograms={},
    ),
)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(state=STATE)


async def unload(client: httpx.AsyncClient, model: str = "tiny", key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return await client.post("/v1/engine/unload", json={"model": model}, headers=headers)


async def test_models_are_listed_with_state_memory_and_idle_time(
    tmp_path: Path, engine: FakeEngine
) -> None:
    async with in_process(make_app(tmp_path, engine)) as client:
        tiny, big = (await client.get("/v1/engine/models")).json()["models"]
    assert tiny == {
        "model": "tiny",
        "task": "chat",
        "state": "ready",
        "progress": 1.0,
        "error": None,
        "device_bytes": 42,
        "idle_s": 3.2,
        "num_loads": 2,
        "keep_s": None,
        "weight_bytes": None,
    }
    assert (big["state"], big["error"], big["device_bytes"]) == ("failed", "It does not fit.", 0)


async def test_without_keys_every_caller_may_unload(tmp_path: Path, engine: FakeEngine) -> None:
    async with in_process(make_app(tmp_path, engine)) as client:
        reply = await unload(client)
        assert (reply.status_code, reply.json()) == (
            200,
            {"model": "tiny", "state": "ready", "num_loads": 2},
        )
        unknown = await unload(client, "nothing")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert engine.unloaded == ["tiny"]


async def test_with_keys_an_admin_key_is_needed(tmp_path: Path, engine: FakeEngine) -> None:
    app = make_app(tmp_path, engine, api_key=("user",), admin_key=("boss",))
    async with in_process(app) as client:
        assert (await unload(client)).status_code == 401
        refused = await unload(client, key="user")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")
        assert engine.unloaded == []
        assert (await unload(client, key="boss")).status_code == 200
    assert engine.unloaded == ["tiny"]


async def test_errors_for_the_log_are_not_shown(tmp_path: Path) -> None:
    damaged = to_info(WeightsError("/a/model.safetensors is damaged."))
    state = replace(STATE, models=(ModelStatus(model="tiny", state="failed", error=damaged),))
    async with in_process(make_app(tmp_path, FakeEngine(state=state))) as client:
        (tiny,) = (await client.get("/v1/engine/models")).json()["models"]
    assert tiny["error"]
    assert "safetensors" not in tiny["error"]
