"""A WebSocket is a request that goes on: keys and limits before it opens, typed errors in it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from support.http import FakeEngine, in_process, live, until
from triptych.core.errors import InvalidRequest, SlowReader, TriptychError
from triptych.core.http.app import create_app
from triptych.core.http.server import HttpServer, serve
from triptych.core.http.upgrade import Wire
from triptych.core.http.websocket import SocketLimits, WebSocket, WebSocketResponse
from triptych.core.options.config import Config, ServerOptions

LIMITS = SocketLimits(message_bytes=1000, num_queued=2, ping_s=0.2, stall_s=0.3, idle_s=1.0)


def last_words(error: TriptychError) -> str:
    return json.dumps({"code": error.code})


async def echo(socket: WebSocket) -> None:
    while True:
        message = await socket.receive()
        if message == "flood":
            while True:
                await socket.send("x" * 100_000)
        if message == "bad":
            raise InvalidRequest("bad")
        if message == "bug":
            raise RuntimeError("secret")
        await socket.send(message if isinstance(message, str) else f"{len(message)} bytes")


def echo_app(**options: Any) -> FastAPI:
    router = APIRouter()

    @router.get("/v1/echo", include_in_schema=False)
    async def route(request: Request) -> WebSocketResponse:
        return WebSocketResponse(echo, LIMITS, last_words, "realtime")

    return create_app(Config(server=ServerOptions(**options)), FakeEngine(), [router])


@asynccontextmanager
async def opened(
    server: HttpServer, path: str = "/v1/echo", **kwargs: Any
) -> AsyncIterator[ClientConnection]:
    url = server.url.replace("http", "ws") + path
    async with asyncio.timeout(20), connect(url, proxy=None, **kwargs) as socket:
        yield socket


async def ending(socket: ClientConnection) -> tuple[str, int]:
    """The code of the last message, and that of the closing frame."""
    error = json.loads(await socket.recv())
    with pytest.raises(ConnectionClosed) as closed:
        await socket.recv()
    assert closed.value.rcvd is not None
    return error["code"], closed.value.rcvd.code


async def test_messages_pass_and_the_request_is_counted_once() -> None:
    app = echo_app()
    with live(app) as server:
        async with opened(server, "/echo", subprotocols=["realtime"]) as socket:
            assert socket.subprotocol == "realtime"
            assert socket.response is not None
            assert socket.response.headers["x-request-id"].startswith("req-")
            await socket.send(["he", "llo"])  # fragments
            assert await socket.recv() == "hello"
            for _ in range(4):  # more bytes than may be queued, in fewer characters
                await socket.send("é" * 400)
                assert await socket.recv() == "é" * 400
            await socket.send(b"123")
            assert await socket.recv() == "3 bytes"
            await asyncio.sleep(0.45)  # pings are answered below the reader
            await socket.send("still here")
            assert await socket.recv() == "still here"
    async with in_process(app) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    (counted,) = [line for line in lines if "requests_total" in line and "/v1/echo" in line]
    assert 'status="101"' in counted
    assert counted.endswith(" 1.0")


KEYED = {"api_key": ("secret",)}
OPENED_BY = (
    {"additional_headers": {"authorization": "Bearer secret"}},
    {"subprotocols": ["realtime", "openai-insecure-api-key.secret"]},
)


@pytest.mark.parametrize("credentials", OPENED_BY)
async def test_a_key_opens_it_in_a_header_or_as_a_subprotocol(credentials: dict[str, Any]) -> None:
    with live(echo_app(**KEYED)) as server:
        async with opened(server, **credentials) as socket:
            await socket.send("hi")
            assert await socket.recv() == "hi"


REFUSED: tuple[tuple[dict[str, Any], dict[str, Any], str, int, str], ...] = (
    (KEYED, {}, "/v1/echo", 401, "invalid_api_key"),
    (KEYED, {"subprotocols": ["openai-insecure-api-key.no"]}, "/v1/echo", 401, "invalid_api_key"),
    ({}, {"origin": "http://evil.example.com"}, "/v1/echo", 403, "foreign_site"),
    ({}, {}, "/v1/nowhere", 404, "not_found"),
)


@pytest.mark.parametrize(("options", "given", "path", "status", "code"), REFUSED)
async def test_a_refusal_is_an_answer_of_http(
    options: dict[str, Any], given: dict[str, Any], path: str, status: int, code: str
) -> None:
    with live(echo_app(**options)) as server, pytest.raises(InvalidStatus) as refused:
        async with opened(server, path, **given):
            pass
    assert refused.value.response.status_code == status
    assert json.loads(refused.value.response.body)["error"]["code"] == code


async def test_an_ordinary_request_is_told_to_upgrade() -> None:
    async with in_process(echo_app()) as client:
        response = await client.get("/v1/echo")
    assert response.status_code == 426
    assert response.json()["error"]["code"] == "upgrade_required"


async def test_only_a_get_can_become_a_socket() -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket"}
    with live(echo_app()) as server:
        async with httpx.AsyncClient() as client:
            answer = await client.post(f"{server.url}/v1/echo", json={}, headers=headers, timeout=5)
    assert answer.status_code == 405


ENDS = (
    ("x" * 1001, "payload_too_large", 1009),
    (["x" * 600, "y" * 600], "payload_too_large", 1009),
    ("bad", "invalid_request", 1008),
    ("bug", "internal_error", 1011),
    ("", "request_timeout", 1008),  # nothing more is sent
)


@pytest.mark.parametrize(("message", "code", "closing"), ENDS)
async def test_an_error_is_a_message_and_then_a_closing_frame(
    message: str | list[str], code: str, closing: int
) -> None:
    with live(echo_app()) as server:
        async with opened(server) as socket:
            await socket.send(message)
            if not message:
                assert await socket.recv() == ""
            assert await ending(socket) == (code, closing)


async def raw(server: HttpServer, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A socket opened by hand, after which `data` is sent."""
    port = int(server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    key = "dGhlIHNhbXBsZSBub25jZQ=="
    writer.write(
        f"GET /v1/echo HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ")
    assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head
    writer.write(data)
    return reader, writer


MALFORMED = (
    b"\x81\x05hello",
    b"\x83\x80\0\0\0\0",
    b"\x81\x82\0\0\0\0\xff\xfe",
    b"\x80\x80\0\0\0\0",
)
"""Unmasked, of an unknown kind, not UTF-8, and a continuation of nothing."""


@pytest.mark.parametrize("frames", MALFORMED)
async def test_malformed_frames_end_it_with_an_error(frames: bytes) -> None:
    with live(echo_app()) as server:
        reader, writer = await raw(server, frames)
        async with asyncio.timeout(10):
            rest = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert b'{"code": "invalid_request"}' in rest
    assert b"\x88" in rest


@pytest.mark.parametrize(("text", "ping_s"), [(b"flood", 9.0), (b"quiet", 0.2)])
async def test_who_neither_reads_nor_answers_pings_is_cut_off(
    text: bytes, ping_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = echo_app()
    limits = dataclasses.replace(LIMITS, ping_s=ping_s, idle_s=9.0)
    monkeypatch.setitem(echo_app.__globals__, "LIMITS", limits)
    with live(app) as server:
        _, writer = await raw(server, b"\x81\x85\0\0\0\0" + text)
        await asyncio.to_thread(until, lambda: server.num_connections == 0)
        writer.close()


class SlowTransport:
    """Its client reads `num_read` bytes between two looks."""

    def __init__(self, num_read: int) -> None:
        self.num_unread, self.num_read = 2**20, num_read

    def get_write_buffer_size(self) -> int:
        self.num_unread -= self.num_read
        return self.num_unread

    async def drain(self) -> None:
        await asyncio.sleep(0 if self.num_unread < 2**18 else 9)

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None: ...

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        assert high - low < 2**17


@pytest.mark.parametrize(("num_read", "is_slow"), [(2**17, False), (1, True)])
async def test_who_reads_at_the_pace_of_speech_is_no_slow_reader(
    num_read: int, is_slow: bool
) -> None:
    socket = WebSocket(dataclasses.replace(LIMITS, stall_s=0.02), last_words)
    headers = {
        "host": "a",
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    socket.accept({"query_string": b"", "raw_path": b"/", "headers": pairs})
    transport: Any = SlowTransport(num_read)
    upgrade: Any = SimpleNamespace(connect=lambda sink: Wire(transport, transport.drain))
    socket.connect(upgrade)
    with pytest.raises(SlowReader) if is_slow else nullcontext():
        await socket.send("sound")


async def test_a_drain_tells_its_reason() -> None:
    app = echo_app()
    servers: list[HttpServer] = []
    config = Config(server=ServerOptions(port=0, drain_timeout_s=0.1))
    started = asyncio.Event()

    def on_started(server: HttpServer) -> None:
        servers.append(server)
        started.set()

    running = asyncio.create_task(serve(app, config, on_started=on_started))
    await started.wait()
    async with opened(servers[0]) as socket:
        await socket.send("hi")
        assert await socket.recv() == "hi"
        draining = asyncio.create_task(servers[0].drain())
        assert await ending(socket) == ("draining", 1013)
    await asyncio.gather(draining, running)
