"""`triptych ps`, `stop` and `explain` against a server."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from support.http import READY, FakeEngine, live, make_app
from triptych import server_cli
from triptych.cli import main
from triptych.core.client.records import ServerRecord
from triptych.core.engine_api.reports import ModelStatus


class UnloadingEngine(FakeEngine):
    """An engine that unloads at once."""

    async def unload(self, model: str) -> None:
        await super().unload(model)
        self.state = replace(self.state, models=(ModelStatus(model=model, state="unloaded"),))


@pytest.fixture
def engine() -> FakeEngine:
    ready = ModelStatus(model="tiny", state="ready", progress=1.0, idle_s=150.0)
    return UnloadingEngine(state=replace(READY, models=(ready,)))


@pytest.fixture
def url(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("TRIPTYCH_SERVER")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with live(make_app(tmp_path / "app", engine)) as server:
        yield server.url


def test_ps(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--server", url]) == 0
    head, row, total = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "kind", "state", "memory", "idle"]
    assert row.split() == ["tiny", "chat", "ready", "2", "min"]
    assert total == f"1 of 1 models, 0 bytes, {url}"


def test_a_model_is_unloaded(
    url: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stop", "tiny", "--server", url]) == 0
    assert "tiny is not in memory" in capsys.readouterr().out
    assert engine.unloaded == ["tiny"]
    assert main(["stop", "other", "--server", url]) == 2
    assert main(["ps", "--server", url]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 of 1 models")
    assert main(["ps", "--all", "--server", url]) == 0
    assert "unloaded" in capsys.readouterr().out


def test_models_of_a_server(
    url: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ("--server", url)
    for argv, words in (
        (["list", *at], f"1 of 1 models, {url}"),
        (["load", "tiny", *at], "tiny is in memory (0 bytes)"),
        (["unload", "tiny", *at], "tiny is unloaded once no request needs it"),
    ):
        assert main(["models", *argv]) == 0
        assert words in capsys.readouterr().out
    for argv, words in (
        (["fetch", "org/new", *at], "those of its start"),
        (["remove", "tiny", *at], "those of its start"),
        (["load", *at], "Name the models"),
        (["verify", *at], "on this machine"),
        (["fetch", "org/new", *at, "--cache-dir", "/x"], "--cache-dir is for the models"),
    ):
        assert main(["models", *argv]) != 0, argv
        assert words in capsys.readouterr().err
    assert engine.unloaded == ["tiny"]


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (ModelStatus(model="tiny", state="ready", num_loads=2), "a request has loaded it again"),
        (ModelStatus(model="tiny", state="loading", num_loads=2), "a request has loaded it again"),
        (ModelStatus(model="tiny", state="failed", num_loads=1), "its last load failed"),
    ],
)
def test_an_unload_ends_though_the_model_is_loaded_again_or_failed(
    url: str,
    engine: FakeEngine,
    after: ModelStatus,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ready = replace(engine.state, models=(ModelStatus(model="tiny", state="ready", num_loads=1),))

    async def unload(model: str) -> None:
        engine.unloaded.append(model)

    def pause(seconds: float) -> None:
        engine.state = replace(engine.state, models=(after,))

    engine.state = ready
    monkeypatch.setattr(engine, "unload", unload)
    monkeypatch.setattr(server_cli.time, "sleep", pause)
    assert main(["stop", "tiny", "--server", url]) == 0
    assert message in capsys.readouterr().out
    assert engine.unloaded == ["tiny"]


def test_without_a_server_there_is_nothing_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for argv in (["ps"], ["stop"], ["stop", "tiny"], ["explain", "req-1"]):
        assert main(argv) == 2
    assert capsys.readouterr().err.count("server of yours runs on this machine") == 4


def test_a_server_is_stopped_by_its_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = ServerRecord(url="http://127.0.0.1:1", host="h", pid=10**7, started_s=1.0)
    two = msgspec.structs.replace(one, url="http://127.0.0.1:2", pid=10**7 + 1)
    running = [one, two]
    killed: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        running.remove(two)

    monkeypatch.setattr(server_cli, "running_servers", lambda: list(running))
    monkeypatch.setattr(server_cli.os, "kill", kill)
    monkeypatch.delenv("TRIPTYCH_SERVER")
    assert main(["stop"]) == 2
    assert "Several servers of yours run" in capsys.readouterr().err
    assert main(["stop", "--server", "http://127.0.0.1:3"]) == 2
    assert main(["stop", "--server", "localhost:2"]) == 0
    assert killed == [(two.pid, signal.SIGTERM)]


REPORT = {
    "request_id": "req-1",
    "route": "/v1/chat/completions",
    "status": 200,
    "length_s": 4.0,
    "prepare_s": 0.01,
    "jobs": [
        {
            "job_id": "1.0",
            "model": "tiny",
            "state": "finished",
            "length_s": 3.9,
            "error": "",
            "seconds": {"queue": 1.0, "decode": 3.0, "load": 0.0},
            "waited_behind": [{"model": "big", "kind": "denoise", "busy_s": 0.5}],
            "counts": {"cached_tokens": 16},
            "new_field": {"x_s": 2.0},
        }
    ],
}


def test_an_explanation_shows_all_its_fields() -> None:
    assert server_cli.explained(REPORT) == [
        "req-1  /v1/chat/completions  status 200, 4.00 s",
        "  prepare: 10.0 ms",
        "",
        "job 1.0  tiny  finished after 3.90 s",
        "  decode     3.00 s   75%",
        "  queue      1.00 s   25%",
        "  waited behind:",
        "    model big, kind denoise, busy 500.0 ms",
        "  counts: cached tokens 16",
        "  new field: x 2.00 s",
    ]


def test_a_request_is_explained(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    sent = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert main(["explain", "req-unknown", "--server", url]) == 2
    assert "No recent request" in capsys.readouterr().err
    assert sent.headers["x-request-id"].startswith("req-")
