"""Binding, draining and stopping."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import httpx
import pytest

from support.http import (
    FakeEngine,
    answer,
    ask,
    chat,
    connect,
    documents,
    live,
    make_app,
    post,
    read_all,
)
from triptych.core.errors import ConfigError
from triptych.core.http.server import HttpServer, bind, serve
from triptych.core.http.wire import WireLimits
from triptych.core.options.config import Config, ServerOptions


def test_a_taken_port_is_one_actionable_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} \([\w ]+\): .*--port"):
            bind(ServerOptions(port=port))


def test_an_unknown_host_is_one_actionable_line() -> None:
    with pytest.raises(ConfigError, match="--host"):
        bind(ServerOptions(host="256.256.256.256"))


def drained(
    tmp_path: Path, engine: FakeEngine, body: dict[str, object], *, timeout_s: float
) -> tuple[httpx.Response, int]:
    """What a request in flight, and a probe, get to see of a drain."""
    app = make_app(tmp_path, engine)
    config = Config(server=ServerOptions(port=0, drain_timeout_s=timeout_s))
    servers: list[HttpServer] = []
    replies: list[httpx.Response] = []
    listener = bind(config.server)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def main() -> int:
        running = asyncio.create_task(
            serve(app, config, on_started=servers.append, listener=listener)
        )
        while not engine.submitted:  # noqa: ASYNC110 - set by a fake
            await asyncio.sleep(0.01)
        draining = asyncio.create_task(servers[0].drain())
        await asyncio.sleep(0.05)
        async with httpx.AsyncClient() as client:
            ready = (await client.get(f"{url}/readyz")).status_code
        if engine.gate is not None and timeout_s > 1:
            engine.gate.set()
        await asyncio.gather(draining, running)
        return ready

    asking = threading.Thread(
        target=lambda: replies.append(ask(url, "/v1/chat/completions", json=body))
    )
    asking.start()
    ready = asyncio.run(main())
    asking.join(10)
    return replies[0], ready


def test_a_drain_lets_requests_in_flight_finish(tmp_path: Path) -> None:
    engine = FakeEngine(gate=threading.Event())
    reply, ready = drained(tmp_path, engine, chat(), timeout_s=10.0)
    assert (reply.status_code, ready) == (200, 503)
    assert engine.cancelled == []


@pytest.mark.parametrize("stream", [True, False])
def test_what_does_not_finish_ends_with_a_typed_error(tmp_path: Path, stream: bool) -> None:
    engine = FakeEngine(is_endless=True, step_s=0.01)
    reply, _ = drained(tmp_path, engine, chat(stream=stream), timeout_s=0.3)
    error = documents(reply.text)[-1]["error"] if stream else reply.json()["error"]
    assert error["code"] == "draining"
    assert reply.status_code == (200 if stream else 503)
    assert engine.running == set()


def test_connections_are_kept_alive_up_to_a_number_of_requests(tmp_path: Path) -> None:
    app = make_app(tmp_path, FakeEngine())
    with live(app, wire=WireLimits(num_requests=3)) as server, connect(server) as sock:
        for left in (2, 1, 0):
            sock.sendall(b"GET /livez HTTP/1.1\r\nhost: t\r\n\r\n")
            reply = answer(sock)
            assert reply.status == 200
            assert reply.will_close == (left == 0)
        assert read_all(sock) == b""


def test_idle_connection_is_closed_silently(tmp_path: Path) -> None:
    app = make_app(tmp_path, FakeEngine())
    with live(app, wire=WireLimits(head_timeout_s=0.2)) as server, connect(server) as sock:
        assert read_all(sock) == b""


def test_there_is_a_most_of_connections(tmp_path: Path) -> None:
    app = make_app(tmp_path, FakeEngine())
    with (
        live(app, wire=WireLimits(num_connections=1)) as server,
        connect(server) as first,
    ):
        first.sendall(b"GET /livez HTTP/1.1\r\nhost: t\r\n\r\n")
        assert answer(first).status == 200
        with connect(server) as second:
            refused = read_all(second)
        assert refused.startswith(b"HTTP/1.1 503")
        assert b'"overloaded"' in refused


def test_two_requests_in_one_packet_get_two_answers(tmp_path: Path) -> None:
    app = make_app(tmp_path, FakeEngine())
    body = b'{"model": "tiny", "prompt": "x"}'
    with live(app) as server, connect(server) as sock:
        sock.sendall(post("/tokenize", body) + post("/tokenize", body, "Connection: close"))
        assert read_all(sock).count(b"HTTP/1.1 200") == 2
