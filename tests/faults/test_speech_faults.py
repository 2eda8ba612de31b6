"""Faults a caller of speech can cause."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.http import ask, connect, documents, in_process, live, post, read_all, refused, until
from support.speech_app import (
    SAMPLES_PER_ID,
    FakeSpeechEngine,
    make_speech_app,
    make_speech_service,
    num_samples,
    speech,
)
from support.tiers import first
from triptych.core.http.server import HttpServer
from triptych.core.http.wire import WireLimits

PATH = "/v1/audio/speech"
LONG = "This is a sentence of some length that is spoken. " * 60


@contextlib.contextmanager
def surviving(engine: FakeSpeechEngine, **server: Any) -> Iterator[HttpServer]:
    """A live server; whatever is done to it, it must still speak afterwards."""
    app = make_speech_app(engine, **server)
    with live(app, wire=WireLimits(linger_s=0.5)) as running:
        yield running
        engine.gate, engine.is_endless = None, False
        assert ask(running.url, PATH, json=speech()).status_code == 200
        until(lambda: not engine.running)
        assert len(engine.table) == 0


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpServer]:
    """One server for everything that never reaches the engine."""
    engine = FakeSpeechEngine()
    with surviving(engine) as server:
        yield server
        assert engine.submitted == {}


def refusal(server: HttpServer, body: dict[str, Any]) -> dict[str, Any]:
    return refused(ask(server.url, PATH, json=body))


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
@pytest.mark.parametrize(
    "text", ["🎉", "🎉 🎊!", "👩‍👩‍👧‍👦", "", "   ", "\n\n", "?!", "\0", "\u202e"]
)
def test_nothing_to_say(shared: HttpServer, text: str, stream_format: str) -> None:
    error = refusal(shared, speech(text, stream_format=stream_format))
    assert (error["param"], error["code"]) == ("input", "invalid_request")


@pytest.mark.parametrize("size", [4097, 100_000, 1_000_000])
def test_endless_text_is_refused_with_the_limit(shared: HttpServer, size: int) -> None:
    error = refusal(shared, speech("word " * (size // 5) + "x" * (size % 5)))
    assert str(size) in error["message"]
    assert "4096" in error["message"]
    assert error["param"] == "input"


def test_a_lone_surrogate_is_no_text(shared: HttpServer) -> None:
    raw = json.dumps(speech("SPOT")).encode().replace(b"SPOT", b"\\ud800")
    reply = ask(shared.url, PATH, content=raw, headers={"content-type": "application/json"})
    assert (reply.status_code, "surrogate" in reply.text) == (400, True)


@pytest.mark.parametrize(
    "voice",
    [
        "../../../etc/passwd",
        "/etc/passwd",
        "..\\..\\voices",
        "ada\0",
        "file:///etc/passwd",
        "voice_" + "A" * 32,
        "voice_" + "a" * 31 + "/",
        "voice_" + "a" * 32 + "\n",
        "%2e%2e%2f",
        "ada" * 80,
        "\u202eada",
    ],
)
def test_a_voice_that_is_a_path_is_no_voice(shared: HttpServer, voice: str) -> None:
    for given in (voice, {"id": voice}):
        error = refusal(shared, speech() | {"voice": given})
        assert error["param"] == "voice"
        assert "/" not in error["message"]


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
@pytest.mark.parametrize("kind", ["mp3", "pcm"])
@pytest.mark.parametrize("stage", ["queued", "running"])
@pytest.mark.parametrize("is_reset", first([True, False]))
def test_a_client_that_leaves_stops_its_speech(
    stream_format: str, kind: str, stage: str, is_reset: bool
) -> None:
    engine = FakeSpeechEngine(is_endless=True, step_s=0.01, gate=threading.Event())
    assert engine.gate is not None
    if stage == "running":
        engine.gate.set()
    with surviving(engine) as server:
        sock = connect(server)
        body = speech(stream_format=stream_format, response_format=kind)
        sock.sendall(post(PATH, json.dumps(body).encode()))
        until(lambda: len(engine.running) == 1)
        if stage == "running":
            until(lambda: engine.num_steps > 5)
        if is_reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        until(lambda: len(engine.cancelled) == 1, timeout_s=2.0)
        num_steps = engine.num_steps
        until(lambda: not server.num_connections)
        assert engine.num_steps <= num_steps + 1
        assert engine.finished == []


def test_what_was_submitted_ahead_is_cancelled_too() -> None:
    engine = FakeSpeechEngine(step_samples=SAMPLES_PER_ID * 40, step_s=0.01)
    with surviving(engine) as server:
        sock = connect(server)
        sock.sendall(post(PATH, json.dumps(speech(LONG, response_format="pcm")).encode()))
        until(lambda: len(engine.running) == 2)
        sock.close()
        until(lambda: not engine.running, timeout_s=2.0)
        assert engine.cancelled


def test_half_of_many_streams_dropped() -> None:
    engine = FakeSpeechEngine(step_s=0.01)
    raw = post(PATH, json.dumps(speech(response_format="pcm")).encode(), "Connection: close")
    with surviving(engine) as server:
        socks = [connect(server) for _ in range(16)]
        for sock in socks:
            sock.sendall(raw)
        until(lambda: len(engine.submitted) == 16)
        for sock in socks[::2]:
            sock.close()
        ends = [read_all(sock).endswith(b"0\r\n\r\n") for sock in socks[1::2]]
        until(lambda: not engine.running)
        assert all(ends)
        assert (len(engine.finished), len(engine.cancelled)) == (8, 8)
        for sock in socks:
            sock.close()


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_a_client_that_stops_reading_is_dropped(stream_format: str) -> None:
    engine = FakeSpeechEngine(is_endless=True, step_samples=48_000)
    app = make_speech_app(engine, stream_timeout_s=0.4)
    body = speech(stream_format=stream_format, response_format="pcm")
    with live(app, wire=WireLimits(linger_s=0.4)) as server:
        host, port = server.url.removeprefix("http://").rsplit(":", 1)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((host, int(port)))
            sock.sendall(post(PATH, json.dumps(body).encode()))
            until(lambda: len(engine.cancelled) == 1, timeout_s=30)
            until(lambda: not server.num_connections)
        assert any(is_paused for _, is_paused in engine.paused)  # it did not run on meanwhile
        assert engine.num_steps < 200
    assert len(app.state.in_flight) == 0


def test_a_client_that_reads_slowly_gets_everything() -> None:
    engine = FakeSpeechEngine(step_samples=24_000)
    raw = post(PATH, json.dumps(speech(LONG[:1000], response_format="pcm")).encode())
    with live(make_speech_app(engine, stream_timeout_s=0.5)) as server, connect(server) as sock:
        sock.sendall(raw.replace(b"Host: t", b"Host: t\r\nConnection: close"))
        data = b""
        for _ in range(8):  # longer than nothing may be read, all in all
            data += sock.recv(32_768)
            time.sleep(0.1)
        data += read_all(sock)
    assert data.endswith(b"0\r\n\r\n")
    assert len(data) > 2 * num_samples(LONG[:1000])


async def test_a_thousand_requests_leave_nothing_behind() -> None:
    engine = FakeSpeechEngine(step_samples=6000)
    service = make_speech_service(engine)
    app = make_speech_app(engine, service)
    async with in_process(app) as client:

        async def one(number: int) -> None:
            body = speech("Hi.", response_format="pcm" if number % 10 else "mp3")
            if number % 3 == 0:
                task = asyncio.create_task(client.post(PATH, json=body))
                await asyncio.sleep(0.001 * (number % 7))
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            else:
                assert (await client.post(PATH, json=body)).status_code == 200

        for start in range(0, 1000, 50):
            await asyncio.gather(*(one(number) for number in range(start, start + 50)))
            if not start:
                before = (num_encoders(), len(asyncio.all_tasks()), threading.active_count())
    assert not engine.running
    assert len(engine.table) == 0
    assert len(app.state.in_flight) == 0
    assert service._admission.num_jobs == 0
    after = (num_encoders(), len(asyncio.all_tasks()), threading.active_count())
    assert all(now <= then + 2 for now, then in zip(after, before, strict=True))


def num_encoders() -> int:
    from triptych.core.media.audio.containers import AudioEncoder

    gc.collect()
    return sum(type(thing) is AudioEncoder for thing in gc.get_objects())


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_speech_that_takes_too_long_is_ended(
    stream_format: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeSpeechEngine(is_endless=True, step_s=0.01)
    with (
        live(make_speech_app(engine, request_timeout_s=0.3)) as server,
        httpx.Client(base_url=server.url, verify=False) as client,
    ):
        body = speech(response_format="pcm", stream_format=stream_format)
        with client.stream("POST", PATH, json=body) as reply:
            if stream_format == "sse":
                assert documents(reply.read().decode())[-1]["error"]["code"] == "request_timeout"
            else:
                with pytest.raises(httpx.TransportError):
                    reply.read()
                assert "stream ended with RequestTimeout" in caplog.text
        until(lambda: len(engine.cancelled) == 1)
