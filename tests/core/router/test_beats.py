"""The state of all replicas as one."""

from __future__ import annotations

import msgspec

from triptych.core.engine_api.reports import Heartbeat, ModelState, ModelStatus
from triptych.core.process.metrics import DEVICE_INFO, series
from triptych.core.router.beats import ReplicaBeat, joint_status, labelled
from triptych.core.router.report import LoadReport


def heartbeat(
    state: ModelState = "ready", num_leased: float = 1.0, *, reduced_context: int = 0
) -> Heartbeat:
    return Heartbeat(
        turn=3,
        phase="idle",
        stall_budget_s=1.0,
        num_jobs=2,
        models=(ModelStatus(model="m", state=state, num_loads=2, reduced_context=reduced_context),),
        gauges={
            series("triptych_kv_pages", model="m"): 10.0,
            series("triptych_kv_pages_leased", model="m"): num_leased,
            series("triptych_backlog_seconds", model="m"): 1.5,
            series("triptych_job_seconds", model="m"): 0.5,
            series("triptych_token_seconds", model="m"): 0.001,
            series(DEVICE_INFO, device="cpu"): 1.0,
        },
        counters={"triptych_x_total": 2.0},
        histograms={"triptych_step_seconds": [1.0, 2.0]},
    )


def beat(name: str, *, is_ready: bool = True, state: ModelState = "ready") -> ReplicaBeat:
    return ReplicaBeat(
        replica=name,
        is_ready=is_ready,
        is_alive=True,
        is_draining=not is_ready,
        beat_age_s=0.1,
        beat=heartbeat(state),
        reason="" if is_ready else "the engine is shutting down",
    )


def test_counts_add_up() -> None:
    status = joint_status([beat("a"), beat("b")], num_restarts=1)
    assert status.is_ready
    assert (status.num_replicas, status.num_restarts) == (2, 1)
    assert status.last_beat is not None
    assert status.last_beat.num_jobs == 4
    assert [model.num_loads for model in status.models] == [4]
    gauges = status.last_beat.gauges
    assert gauges['triptych_kv_pages{model="m"}'] == 20
    assert gauges['triptych_job_seconds{model="m"}'] == 0.5, "a job takes no longer on two"
    assert gauges['triptych_device_info{device="cpu"}'] == 1
    assert status.last_beat.counters == {"triptych_x_total": 4.0}
    assert status.last_beat.histograms == {"triptych_step_seconds": [2.0, 4.0]}


def test_a_context_fits_every_replica() -> None:
    beats = [
        msgspec.structs.replace(beat(str(length)), beat=heartbeat(reduced_context=length))
        for length in (0, 4000, 2000)
    ]
    assert [each.reduced_context for each in joint_status(beats, 0).models] == [2000]


def test_one_that_is_ready_is_enough() -> None:
    status = joint_status([beat("a", is_ready=False, state="loading"), beat("b")], 0)
    assert status.is_ready
    assert not status.is_draining
    assert status.num_replicas == 1
    assert [each.state for each in status.models] == ["ready"]


def test_none_is_not_ready_and_says_why() -> None:
    empty = joint_status([], 0)
    assert (empty.is_ready, empty.is_alive, empty.last_beat) == (False, True, None)
    assert empty.reason == "no replica is ready"
    leaving = joint_status([beat("a", is_ready=False)], 0)
    assert leaving.reason == "the engine is shutting down"
    assert leaving.is_draining


def test_metrics_name_their_replica() -> None:
    found = labelled({"a": heartbeat(), "b": heartbeat(num_leased=4.0)})
    assert found is not None
    assert found.gauges['triptych_kv_pages_leased{model="m",replica="b"}'] == 4
    assert found.counters == {
        'triptych_x_total{replica="a"}': 2.0,
        'triptych_x_total{replica="b"}': 2.0,
    }
    assert labelled({}) is None


def test_a_heartbeat_reports_the_load() -> None:
    report = LoadReport.of(heartbeat(num_leased=5.0), page_size=16)
    assert report == LoadReport(
        backlog_s=1.5,
        job_s={"m": 0.5},
        token_s={"m": 0.001},
        cache_tokens=160,
        page_use=0.5,
        ready=("m",),
    )
    assert LoadReport.of(heartbeat("loading"), 16).ready == ()
