"""Event streams: frames, heartbeats, and what happens when one breaks."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest

from support.http import ANSWER, FakeEngine, ask, chat, documents, in_process, live, make_app, until
from triptych.core.errors import EngineDown, NonFinite, Overloaded
from triptych.core.process.logs import JsonFormatter


async def test_a_stream_is_what_openai_sends(tmp_path: Path) -> None:
    app = make_app(tmp_path, FakeEngine())
    async with in_process(app) as client:
        reply = await client.post("/v1/chat/completions", json=chat(stream=True, max_tokens=99))
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    *events, done = documents(reply.text)
    assert done == "[DONE]"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    assert deltas[-1] == {}
    assert [event["choices"][0]["finish_reason"] for event in events[-2:]] == [None, "stop"]
    assert all("usage" not in event for event in events)


async def test_an_error_before_the_first_token_has_its_own_status(tmp_path: Path) -> None:
    app = make_app(tmp_path, FakeEngine(error=Overloaded("full", retry_after_s=7)))
    async with in_process(app) as client:
        reply = await client.post("/v1/chat/completions", json=chat(stream=True))
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "7")
    assert reply.json()["error"]["code"] == "overloaded"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDown("The engine died."), "engine_down"),
        (NonFinite("NaN."), "non_finite"),
        (RuntimeError("secret"), "internal_error"),
    ],
)
async def test_an_error_after_the_first_token_is_the_last_frame(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception, code: str
) -> None:
    app = make_app(tmp_path, FakeEngine(error=error, num_good=3))
    async with in_process(app) as client:
        reply = await client.post("/v1/chat/completions", json=chat(stream=True))
    *events, last = documents(reply.text)
    assert reply.status_code == 200
    assert len(events) == 4  # the role, and three tokens
    assert last["error"]["code"] == code
    assert last["error"]["request_id"] == reply.headers["x-request-id"]
    assert "secret" not in reply.text
    (logged,) = [record for record in caplog.records if record.name == "triptych.core.http.sse"]
    assert last["error"]["request_id"] in JsonFormatter().format(logged)


def test_silence_is_broken_by_comments_that_clients_ignore(tmp_path: Path) -> None:
    engine = FakeEngine(gate=threading.Event())
    app = make_app(tmp_path, engine, heartbeat_s=0.05)
    with (
        live(app) as server,
        httpx.stream("POST", f"{server.url}/v1/chat/completions", json=chat(stream=True)) as reply,
    ):
        lines = reply.iter_lines()
        beats = [next(lines) for _ in range(4)]
        assert beats == [": waiting", "", ": waiting", ""]
        assert engine.gate is not None
        engine.gate.set()
        rest = list(lines)
    events = documents("\n".join(rest))
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1] == "[DONE]"


def test_an_error_after_a_heartbeat_is_a_frame(tmp_path: Path) -> None:
    engine = FakeEngine(gate=threading.Event(), error=EngineDown("The engine died."))
    app = make_app(tmp_path, engine, heartbeat_s=0.05)
    with (
        live(app) as server,
        httpx.stream("POST", f"{server.url}/v1/chat/completions", json=chat(stream=True)) as reply,
    ):
        lines = reply.iter_lines()
        assert next(lines) == ": waiting"
        assert engine.gate is not None
        engine.gate.set()
        events = documents("\n".join(lines))
    assert [event["error"]["code"] for event in events] == ["engine_down"]


@pytest.mark.parametrize("stream", [True, False])
def test_time_is_limited(tmp_path: Path, stream: bool) -> None:
    engine = FakeEngine(is_endless=True, step_s=0.01)
    app = make_app(tmp_path, engine, request_timeout_s=1)
    with live(app) as server:
        # From then on the process that runs the template is up, and costs no time.
        ask(server.url, "/tokenize", json={key: chat()[key] for key in ("model", "messages")})
        reply = ask(server.url, "/v1/chat/completions", json=chat(stream=stream))
    error = documents(reply.text)[-1]["error"] if stream else reply.json()["error"]
    assert reply.status_code == (200 if stream else 408)
    assert error["code"] == "request_timeout"
    until(lambda: len(engine.cancelled) == 1)
