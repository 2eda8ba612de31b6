"""Probes and metrics report what the engine's client knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.http import READY, FakeEngine, chat, in_process, make_app
from triptych.core.engine_api.client import EngineStatus
from triptych.core.engine_api.job_report import JobReport
from triptych.core.engine_api.reports import Heartbeat, ModelStatus
from triptych.core.errors import ErrorInfo
from triptych.core.process.metric_table import FAMILIES
from triptych.core.process.metrics import HISTOGRAM_BOUNDS, STEP_SECONDS, Histogram, series

LOADING = replace(
    READY,
    is_ready=False,
    reason="loading tiny",
    models=(ModelStatus(model="tiny", state="loading", progress=0.5),),
)
HUNG = replace(READY, is_alive=False, is_ready=False, reason="the loop makes no progress")


@pytest.mark.parametrize(
    ("state", "live", "ready"),
    [
        (READY, 200, 200),
        (LOADING, 200, 503),
        (HUNG, 503, 503),
        (replace(READY, is_alive=False), 503, 503),
        (replace(READY, is_draining=True), 200, 503),
    ],
)
async def test_probes_are_truthful(
    tmp_path: Path, state: EngineStatus, live: int, ready: int
) -> None:
    async with in_process(make_app(tmp_path, FakeEngine(state=state))) as client:
        statuses = [(await client.get(path)).status_code for path in ("/livez", "/readyz")]
        health = await client.get("/health")
    assert [*statuses, health.status_code] == [live, ready, ready]
    reason = health.json()["reason"]
    assert reason.startswith(state.reason)
    assert bool(reason) == (ready == 503)


async def test_a_server_without_one_of_its_models_is_ready_and_says_so(tmp_path: Path) -> None:
    large = ErrorInfo(code="model_too_large", message="m can never fit: give --max-length 9.")
    failed = ModelStatus(model="m", state="failed", error=large)
    engine = FakeEngine(state=replace(READY, models=(*READY.models, failed)))
    num_models = len(READY.models) + 1
    async with in_process(make_app(tmp_path, engine)) as client:
        reply = await client.get("/readyz")
    health = reply.json()
    assert (reply.status_code, health["is_ready"]) == (200, True)
    assert health["reason"] == f"{num_models - 1} of {num_models} models can be served"
    assert health["models"][-1]["message"] == large.message


async def test_health_lists_models_with_errors_that_name_no_path(tmp_path: Path) -> None:
    failed = ModelStatus(
        model="m", state="failed", error=ErrorInfo(code="weights_error", message="/secret/path")
    )
    engine = FakeEngine(state=replace(LOADING, models=(*LOADING.models, failed)))
    async with in_process(make_app(tmp_path, engine)) as client:
        models = (await client.get("/health")).json()["models"]
    assert models == [
        {"model": "tiny", "state": "loading", "progress": 0.5, "error": None, "message": None},
        {
            "model": "m",
            "state": "failed",
            "progress": 0.0,
            "error": "weights_error",
            "message": "The model cannot be served right now; see the server's log.",
        },
    ]


async def test_this_process_draining_is_not_ready(tmp_path: Path) -> None:
    app = make_app(tmp_path, FakeEngine())
    await app.state.in_flight.drain(0.1)
    async with in_process(app) as client:
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        refused = await client.post("/v1/chat/completions", json=chat())
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["connection"] == "close"


async def test_version_route(tmp_path: Path) -> None:
    async with in_process(make_app(tmp_path, FakeEngine())) as client:
        assert set((await client.get("/version")).json()) == {"name", "version"}


def beat() -> Heartbeat:
    steps = Histogram(HISTOGRAM_BOUNDS[STEP_SECONDS])
    for seconds in (0.001, 0.02, 99.0):
        steps.observe(seconds)
    return Heartbeat(
        turn=1,
        phase="idle",
        stall_budget_s=1.0,
        num_jobs=0,
        models=(),
        gauges={series("triptych_kv_pages", model='a"\\b'): 5.0},
        counters={"triptych_tokens_total": 7.0},
        histograms={
            series(STEP_SECONDS, kind="decode"): steps.snapshot(),
            series(STEP_SECONDS, kind="prefill"): steps.snapshot(),
        },
    )


async def test_a_heartbeat_becomes_prometheus_families(tmp_path: Path) -> None:
    engine = FakeEngine(state=replace(READY, last_beat=beat(), num_restarts=2))
    async with in_process(make_app(tmp_path, engine)) as client:
        text = (await client.get("/metrics")).text
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["triptych_kv_pages", ("model", 'a"\\b')] == 5
    assert samples[("triptych_tokens_total",)] == 7
    assert samples[("triptych_engine_restarts_total",)] == 2
    assert samples[("triptych_engine_ready",)] == 1
    bucket = f"{STEP_SECONDS}_bucket"
    assert samples[bucket, ("kind", "decode"), ("le", "0.001")] == 1
    assert samples[bucket, ("kind", "decode"), ("le", "30.0")] == 2
    assert samples[bucket, ("kind", "prefill"), ("le", "+Inf")] == 3
    assert samples[f"{STEP_SECONDS}_count", ("kind", "decode")] == 3
    assert samples[f"{STEP_SECONDS}_sum", ("kind", "decode")] == pytest.approx(99.021)


async def test_requests_and_tokens_are_counted_and_timed(tmp_path: Path) -> None:
    async with in_process(make_app(tmp_path, FakeEngine())) as client:
        await client.post("/v1/chat/completions", json=chat(max_tokens=5, n=2))
        await client.post("/v1/chat/completions", json={})
        await client.get("/anything/../else")
        text = (await client.get("/metrics")).text
    route = 'route="/v1/chat/completions"'
    assert f'triptych_http_requests_total{{model="tiny",{route},status="200"}} 1.0' in text
    assert f'triptych_http_requests_total{{model="",{route},status="400"}} 1.0' in text
    assert 'triptych_http_requests_total{model="",route="unmatched",status="404"} 1.0' in text
    assert f'triptych_http_request_seconds_count{{model="tiny",{route},status="200"}} 1.0' in text
    assert 'triptych_inter_token_seconds_bucket{le="0.0005",model="tiny"}' in text
    assert 'triptych_time_to_first_token_seconds_count{model="tiny"} 2.0' in text
    assert 'triptych_inter_token_seconds_count{model="tiny"} 8.0' in text
    assert "triptych_http_requests_in_flight 1.0" in text  # this one
    assert "_created" not in text


async def test_every_family_is_described(tmp_path: Path) -> None:
    now = replace(READY, last_beat=beat(), by_replica={"a": beat()})
    async with in_process(make_app(tmp_path, FakeEngine(state=now))) as client:
        await client.post("/v1/chat/completions", json=chat(max_tokens=5))
        text = (await client.get("/metrics")).text
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert len(found) > 20
    for name, family in found.items():
        known = FAMILIES.get(name if family.type != "counter" else f"{name}_total")
        if name == "triptych_tokens":  # no metric of ours: the heartbeat of these tests has it
            continue
        assert known is not None, name
        assert (family.type, family.documentation) == (known.kind, known.help)
        used = {label for sample in family.samples for label in sample.labels}
        assert used - {"le", "replica"} <= set(known.labels)
    (build,) = found["triptych_build_info"].samples
    assert build.value == 1
    assert build.labels["version"]


async def test_a_model_that_is_not_served_is_no_label(tmp_path: Path) -> None:
    async with in_process(make_app(tmp_path, FakeEngine())) as client:
        await client.post("/v1/chat/completions", json=chat(model="no-such-model"))
        text = (await client.get("/metrics")).text
    assert "no-such-model" not in text


async def test_waits_of_jobs_are_observed(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with in_process(make_app(tmp_path, engine)) as client:
        engine.journal.open("call.0", "tiny")
        report = JobReport(state="finished", arrival_s=0.0, length_s=2.0, waits={"queue": 1.5})
        engine.journal.add_report("call.0", report)
        text = (await client.get("/metrics")).text
    assert 'triptych_job_wait_seconds_sum{model="tiny",reason="queue"} 1.5' in text
