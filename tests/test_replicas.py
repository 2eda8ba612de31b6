"""What is decided without Ray: how many replicas, what they cannot have, when to scale or leave."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import MutableHeaders

from support.http import FakeEngine, in_process, make_app
from triptych import cli
from triptych.core.bulk.cluster import engine_resources
from triptych.core.errors import ConfigError
from triptych.core.options.batch_limits import LEAST_ROWS
from triptych.core.options.config import (
    Config,
    DeviceOptions,
    ReplicaOptions,
    ScheduleOptions,
    ServerOptions,
)
from triptych.replicas import handover, launch
from triptych.replicas.plan import ReplicaPlan
from triptych.replicas.request_ids import ProxyRequestIds
from triptych.replicas.scaling import PAGE_USE, QUEUE_S, QueueScaling, replicas_needed


def plan_of(replicas: str, **options: object) -> ReplicaPlan:
    return ReplicaPlan.of(Config(replicas=ReplicaOptions(replicas=replicas), **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "least", "most"), [("1", 1, 1), ("3", 3, 3), ("2..8", 2, 8), ("1..1", 1, 1)]
)
def test_a_number_or_a_range(given: str, least: int, most: int) -> None:
    plan = plan_of(given)
    assert (plan.least, plan.most) == (least, most)
    assert plan.needs_ray == (most > 1)


@pytest.mark.parametrize("given", ["0", "", "two", "3..2", "0..2", "-1", "1...2", "99999"])
def test_what_is_no_count_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--replicas"):
        plan_of(given)


def test_one_replica_on_a_cluster_needs_ray() -> None:
    options = ReplicaOptions(ray_address="auto")
    assert ReplicaPlan.of(Config(replicas=options)).needs_ray


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"server": ServerOptions(headless=True)}, "--headless"),
        ({"server": ServerOptions(external_engine=True)}, "--external-engine"),
        ({"server": ServerOptions(port=0)}, "--port 0"),
        ({"server": ServerOptions(zmq_endpoint_base="/x")}, "--zmq-endpoint-base"),
        ({"device": DeviceOptions(device="gpu:1")}, "--device gpu:1"),
    ],
)
def test_what_is_for_one_engine_is_refused_by_name(options: dict[str, object], flag: str) -> None:
    plan_of("1", **options)
    with pytest.raises(ConfigError, match=flag):
        plan_of("2", **options)


@pytest.mark.parametrize(
    ("flag", "options", "idle", "read"),
    [
        ("--replica-routing", {"replica_routing": "round-robin"}, "1", "2"),
        ("--replica-queue-s", {"replica_queue_s": 1.0}, "2", "1..2"),
        ("--replica-downscale-delay-s", {"replica_downscale_delay_s": 1.0}, "2", "1..2"),
    ],
)
def test_what_nothing_would_read_is_refused_by_name(
    flag: str, options: dict[str, Any], idle: str, read: str
) -> None:
    ReplicaPlan.of(Config(replicas=ReplicaOptions(replicas=read, **options)))
    with pytest.raises(ConfigError, match=f"^{flag} has no effect with --replicas {idle}"):
        ReplicaPlan.of(Config(replicas=ReplicaOptions(replicas=idle, **options)))


def test_engines_get_no_keys_and_their_share_of_threads() -> None:
    config = Config(server=ServerOptions(api_key=("secret",), api_key_file="keys"))
    plan = plan_of("2")
    engine = plan.engine_config(config)
    assert (engine.server.api_key, engine.server.api_key_file) == ((), "")
    assert engine.device.threads >= 1
    given = replace(config, device=DeviceOptions(threads=3))
    assert plan.engine_config(given).device.threads == 3
    ingress = plan.ingress_config(config)
    assert ingress.server.api_key == ("secret",)
    assert ingress.schedule.max_queue_size == 2 * config.schedule.max_queue_size
    assert ingress.schedule.max_batch_size == 2 * LEAST_ROWS, "what two engines hold at least"
    config = replace(config, schedule=ScheduleOptions(max_batch_size=3))
    assert plan.ingress_config(config).schedule.max_batch_size == 6


@pytest.mark.parametrize(
    ("device", "has_gpus", "expected"),
    [
        ("cpu", True, {"num_cpus": 6}),
        ("auto", False, {"num_cpus": 6}),
        ("auto", True, {"num_gpus": 2, "num_cpus": 2}),
        ("default", True, {"num_gpus": 2, "num_cpus": 2}),
        ("gpu", False, {"num_gpus": 2, "num_cpus": 2}),
    ],
)
def test_ray_sets_aside_what_all_ranks_of_an_engine_take(
    device: str, has_gpus: bool, expected: dict[str, int]
) -> None:
    options = DeviceOptions(device=device, threads=3, tensor_parallel_size=2)
    assert engine_resources(options, has_gpus=has_gpus) == expected


def test_more_replicas_than_gpus_are_refused() -> None:
    options = DeviceOptions(device="auto", tensor_parallel_size=2)
    for num_gpus in (0, 4):
        plan_of("2").check_room(options, num_gpus)
    with pytest.raises(ConfigError, match="--replicas 2 needs 4 GPUs, and this machine has 3"):
        plan_of("2").check_room(options, 3)
    plan_of("2").check_room(DeviceOptions(device="cpu"), 1)


def test_ranks_of_all_replicas_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    config = Config(device=DeviceOptions(tensor_parallel_size=3))
    assert plan_of("2").engine_config(config).device.threads == 2


def test_replicas_follow_the_work() -> None:
    assert replicas_needed({"a": 0.0}, {"a": 0.0}, target_queue_s=2.0) == 1
    assert replicas_needed({"a": 5.0, "b": 2.0}, {}, target_queue_s=2.0) == 4
    assert replicas_needed({"a": 0.1, "b": 0.1}, {"a": 0.9, "b": 0.95}, target_queue_s=2.0) == 3


def test_the_policy_keeps_what_there_is_until_it_knows_more() -> None:
    policy = QueueScaling(target_queue_s=1.0)
    unknown = SimpleNamespace(aggregated_metrics={}, target_num_replicas=3)
    assert policy(unknown) == (3, {})
    known = {QUEUE_S: {"a": 4.0}, PAGE_USE: {"a": 0.1}}
    assert policy(SimpleNamespace(aggregated_metrics=known, target_num_replicas=1)) == (4, {})


async def test_an_ingress_leaves_once_it_surely_runs_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handover, "POLL_S", 0.0)
    seen: list[Collection[str] | None] = [
        *((), ["old"], ["old"]),  # another one runs while it starts
        *(["me"], ["new"], ["me"]),  # once wrong
        *(None, None, None, ["new"], None, ["me"]),  # not known
        *(["new"], None, ()),
    ]

    async def find_running() -> Collection[str] | None:
        return seen.pop(0)

    await handover.wait_replaced("me", find_running)
    assert not seen


def test_a_signal_that_another_thread_takes_stops_the_server() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    sender = threading.Timer(0.1, signal.pthread_kill, (other.ident, signal.SIGTERM))
    sender.start()
    try:
        launch._stay()
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
    finally:
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)
        other.join()


def test_without_ray_the_command_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("ray"):
        pytest.skip("Ray is installed")
    assert cli.main(["serve", "--replicas", "2"]) == 2
    assert "pip install '.[ray]'" in capsys.readouterr().err


async def test_a_response_behind_the_proxy_has_one_request_id(tmp_path: Path) -> None:
    """The proxy, as Ray's does, adds the id that it chose to the request and to the response."""
    app = ProxyRequestIds(make_app(tmp_path, FakeEngine()))

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        async def stamp(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append("x-request-id", "a33c908d-5f0c")
            await send(message)

        MutableHeaders(scope=scope).append("x-request-id", "a33c908d-5f0c")
        await app(scope, receive, stamp)

    async with in_process(proxy) as http:
        answer = await http.get("/v1/models")
    assert answer.headers.get_list("x-request-id") == ["a33c908d-5f0c"]


def test_the_end_of_a_cluster_prints_nothing_of_rays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = []

    def shut_down(*given: object) -> None:
        print("(raylet) Task failed. There are infinite retries remaining")
        ended.append(given)

    serve = SimpleNamespace(delete=shut_down, shutdown=shut_down)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve, shutdown=shut_down))
    launch._end()
    assert (ended, capsys.readouterr().out) == ([("triptych",), (), ()], "")
