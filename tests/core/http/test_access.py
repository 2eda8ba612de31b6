"""Request ids and the access log."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from httpx import Client, ReadTimeout

from support.http import ANSWER, FakeEngine, chat, in_process, live, make_app, until
from triptych.core.errors import Overloaded
from triptych.core.options.config import ServerOptions
from triptych.core.process.logs import configure


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The root log as JSON, put back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure(ServerOptions(log_format="json"), stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(log: io.StringIO, message: str) -> list[dict[str, object]]:
    entries = [json.loads(line) for line in log.getvalue().splitlines()]
    return [entry for entry in entries if entry["message"] == message]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/nowhere", "/livez"])
async def test_a_sane_id_is_echoed_everywhere(tmp_path: Path, path: str) -> None:
    async with in_process(make_app(tmp_path, FakeEngine())) as client:
        reply = await client.get(path, headers={"x-request-id": "my-id_1.2"})
    assert reply.headers["x-request-id"] == "my-id_1.2"
    if reply.status_code >= 400:
        assert reply.json()["error"]["request_id"] == "my-id_1.2"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "<script>", "a\tb", "é"])
async def test_an_odd_id_is_replaced(tmp_path: Path, given: str) -> None:
    async with in_process(make_app(tmp_path, FakeEngine())) as client:
        reply = await client.get("/v1/models", headers={"x-request-id": given.encode()})
    assert reply.headers["x-request-id"].startswith("req-")


async def test_equal_ids_of_two_requests_do_not_collide(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with in_process(make_app(tmp_path, engine), **{"x-request-id": "same"}) as client:
        replies = [await client.post("/v1/chat/completions", json=chat()) for _ in range(2)]
    assert len(engine.submitted) == 2
    assert len({reply.json()["id"] for reply in replies}) == 2


async def test_a_line_per_request_without_its_text(tmp_path: Path, log: io.StringIO) -> None:
    async with in_process(make_app(tmp_path, FakeEngine())) as client:
        reply = await client.post("/v1/chat/completions", json=chat("a secret"))
        await client.get("/a/secret?path=secret")
        await client.get("/readyz")  # a probe comes every few seconds: not worth a line
    usage = reply.json()["usage"]
    first_usage = usage["prompt_tokens"], usage["completion_tokens"]
    first, second = lines(log, "request")
    assert (first["route"], first["status"], first["method"]) == (
        "/v1/chat/completions",
        200,
        "POST",
    )
    assert {"request_id", "elapsed_ms", "key", "time", "level"} <= set(first)
    assert "call_id" not in first, "it is part of the request id"
    assert (first["model"], first["client"]) == ("tiny", "127.0.0.1")
    assert (first["prompt_tokens"], first["completion_tokens"]) == (first_usage[0], first_usage[1])
    assert not {"model", "prompt_tokens"} & set(second)
    assert (second["route"], second["status"]) == ("unmatched", 404)
    own = [line for line in log.getvalue().splitlines() if '"logger": "triptych' in line]
    assert len(own) == 2
    assert not any("secret" in line or "fox" in line for line in own)


@pytest.mark.parametrize("stream", [True, False])
async def test_texts_are_logged_where_the_operator_wants_it(
    tmp_path: Path, log: io.StringIO, stream: bool
) -> None:
    async with in_process(make_app(tmp_path, FakeEngine(), log_prompts=True)) as client:
        reply = await client.post(
            "/v1/chat/completions", json=chat("a secret", stream=stream, max_tokens=99)
        )
    (prompt,), (answer,) = lines(log, "prompt"), lines(log, "answer")
    assert "a secret" in json.dumps(prompt["text"])
    assert answer["text"] == [ANSWER]
    assert answer["request_id"] == reply.headers["x-request-id"]


async def test_an_unexpected_failure_is_in_the_log_by_request_id(
    tmp_path: Path, log: io.StringIO
) -> None:
    app = make_app(tmp_path, FakeEngine(error=RuntimeError("a bug")))
    async with in_process(app) as client:
        reply = await client.post("/v1/chat/completions", json=chat())
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    (entry,) = lines(log, "request failed")
    assert entry["request_id"] == reply.headers["x-request-id"]
    assert "a bug" in str(entry["traceback"])


def test_a_client_that_left_is_logged_as_such(tmp_path: Path, log: io.StringIO) -> None:
    engine = FakeEngine(is_endless=True, step_s=0.01)
    with live(make_app(tmp_path, engine)) as server:
        with Client(timeout=0.3) as client, pytest.raises(ReadTimeout):
            client.post(f"{server.url}/v1/chat/completions", json=chat())
        until(lambda: bool(lines(log, "request")))
    assert lines(log, "request")[0]["status"] == 499


async def test_a_client_with_an_id_of_its_own_is_logged_with_both(
    tmp_path: Path, log: io.StringIO
) -> None:
    async with in_process(make_app(tmp_path, FakeEngine())) as client:
        await client.get("/v1/models", headers={"x-request-id": "mine"})
    (entry,) = lines(log, "request")
    assert entry["request_id"] == "mine"
    assert len(str(entry["call_id"])) == 32


async def test_the_access_log_alone_can_be_left_out(tmp_path: Path, log: io.StringIO) -> None:
    app = make_app(tmp_path, FakeEngine(error=RuntimeError("a bug")), access_log=False)
    async with in_process(app) as client:
        await client.post("/v1/chat/completions", json=chat())
        counts = (await client.get("/metrics")).text
    assert not lines(log, "request")
    assert lines(log, "request failed")
    assert 'route="/v1/chat/completions",status="500"' in counts, "it is counted all the same"


async def test_a_refused_request_has_a_model_and_no_tokens(
    tmp_path: Path, log: io.StringIO
) -> None:
    async with in_process(make_app(tmp_path, FakeEngine(error=Overloaded("Full.")))) as client:
        await client.post("/v1/chat/completions", json=chat())
    (entry,) = lines(log, "request")
    assert (entry["status"], entry["model"]) == (503, "tiny")
    assert "prompt_tokens" not in entry
