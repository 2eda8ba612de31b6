"""What is on the wire is HTTP, or it is refused."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.http import (
    FakeEngine,
    answer,
    ask,
    chat,
    connect,
    live,
    make_app,
    post,
    read_all,
    until,
)
from support.other_apis import other_apis_app
from triptych.core.http.server import HttpServer
from triptych.core.http.wire import WireLimits

CHAT = "/v1/chat/completions"
BODY = json.dumps(chat()).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A live server that must still answer at the end."""
    app = make_app(tmp_path_factory.mktemp("app"), FakeEngine())
    wire = WireLimits(head_timeout_s=0.4, body_timeout_s=0.6, discarded_bytes=2**16)
    with live(app, wire=wire) as server:
        yield server
        assert ask(server.url, CHAT, json=chat()).status_code == 200


def sent(server: HttpServer, raw: bytes) -> bytes:
    with connect(server) as sock:
        sock.sendall(raw)
        return read_all(sock)


@pytest.mark.parametrize(
    "raw",
    [
        post(CHAT, b"0\r\n\r\n", "Content-Length: 5", "Transfer-Encoding: chunked"),
        post(CHAT, b"0\r\n\r\n", "Transfer-Encoding: chunked", "Content-Length: 5"),
        post(CHAT, BODY, f"Content-Length: {len(BODY)}", "Content-Length: 3"),
        post(CHAT, BODY, f"Content-Length: {len(BODY)}, {len(BODY)}"),
        post(CHAT, BODY, f"Content-Length: +{len(BODY)}"),
        post(CHAT, BODY, "Content-Length: -1"),
        post(CHAT, BODY, "Content-Length: 0x10"),
        post(CHAT, BODY, "Transfer-Encoding: chunked, identity"),
        post(CHAT, b"zz\r\n", "Transfer-Encoding: chunked"),
        post(CHAT, b"-5\r\nhello\r\n", "Transfer-Encoding: chunked"),
        post(CHAT, b"fffffffffffffffff\r\n", "Transfer-Encoding: chunked"),
        b"GET /livez HTTP/1.1\r\nHost : t\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n Host: t\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: t\r\nX: a\rb\r\n\r\n",
        b"GET /livez HTTP/9.9\r\n\r\n",
        b"GET /livez HTTP/0.9\r\nHost: t\r\n\r\n",
        b"GET /livez\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: t\r\nHost: t\r\n\r\n",
        b"GET /livez HTTP/1.0\r\nHost: t\r\nHost: t\r\n\r\n",
        post(CHAT, BODY, "Transfer-Encoding: foo"),
        post(CHAT, b"0\r\n\r\n", "Transfer-Encoding: gzip, chunked"),
        post(CHAT, b"5\r\nhello\r\nzz\r\n", "Transfer-Encoding: chunked"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\0" * 100,
    ],
)
def test_what_two_readers_could_read_differently_is_refused(server: HttpServer, raw: bytes) -> None:
    response = sent(server, raw)
    assert response.startswith(b"HTTP/1.1 400")
    assert response.count(b"HTTP/1.1 ") == 1


def test_an_older_client_needs_no_host(server: HttpServer) -> None:
    assert sent(server, b"GET /livez HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_a_refusal_never_stands_for_the_answer_before_it(tmp_path: Path) -> None:
    engine = FakeEngine(gate=threading.Event())
    with live(make_app(tmp_path, engine)) as server, connect(server) as sock:
        sock.sendall(post(CHAT, BODY) + post(CHAT, b"zz\r\n", "Transfer-Encoding: chunked"))
        assert read_all(sock) == b""
        until(lambda: not engine.running)
    assert not engine.finished


def test_what_cannot_be_parsed_is_answered_in_the_shape_of_errors(server: HttpServer) -> None:
    head, _, body = sent(server, b"nonsense\r\n\r\n").partition(b"\r\n\r\n")
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert error["code"] == "invalid_request"
    assert f"x-request-id: {error['request_id']}".encode() in head


def test_a_refusal_is_in_the_words_of_the_api_that_is_asked(tmp_path: Path) -> None:
    def document(path: str, body: bytes, *headers: str) -> Any:
        head, _, answered = sent(server, post(path, body, *headers)).partition(b"\r\n\r\n")
        assert (b"\r\nrequest-id: " in head) is is_anthropic
        assert b"request_id" in answered or not is_anthropic
        return json.loads(answered)

    chunked, coded = "Transfer-Encoding: chunked", "Transfer-Encoding: gzip"
    with live(other_apis_app(tmp_path, FakeEngine())) as server:
        is_anthropic = True
        for found in (
            document("/v1/messages", b"zz\r\n", chunked),
            document(CHAT, b"", "anthropic-version: 1", coded),
            document("/v1/messages/count_tokens?beta=true", b"", "X: " + "x" * 40_000),
        ):
            assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
        is_anthropic = False
        assert isinstance(document("/api/chat", b"zz\r\n", chunked)["error"], str)
        assert document("/v1/messagesque", b"", coded)["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip, identity"])
def test_compressed_bodies_are_not_read(server: HttpServer, encoding: str) -> None:
    bomb = gzip.compress(b" " * 10**7)
    reply = ask(
        server.url,
        CHAT,
        content=bomb,
        headers={"content-type": "application/json", "content-encoding": encoding},
    )
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["", "text/plain", "multipart/form-data; boundary=x", "json"])
def test_only_json_is_read(server: HttpServer, kind: str) -> None:
    reply = ask(server.url, CHAT, content=BODY, headers={"content-type": kind})
    assert reply.status_code == 415


def test_after_an_early_answer_only_so_much_is_thrown_away(server: HttpServer) -> None:
    with connect(server) as sock:
        sock.sendall(post("/nowhere", b"", "Content-Length: 100000000"))
        assert answer(sock).status == 404
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            sock.sendall(b"x" * 50_000_000)


FAR_TOO_MUCH = b"x" * 12_000_000


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (post("/nowhere", FAR_TOO_MUCH), 404),
        (post("/nowhere", FAR_TOO_MUCH, "Connection: close"), 404),
        (post("/nowhere", FAR_TOO_MUCH).replace(b"HTTP/1.1", b"HTTP/1.0", 1), 404),
        (post(CHAT, FAR_TOO_MUCH), 413),
        (post(CHAT, FAR_TOO_MUCH, "Connection: close"), 413),
        (post(CHAT, b"zz\r\n" + FAR_TOO_MUCH, "Transfer-Encoding: chunked"), 400),
        (post(CHAT, FAR_TOO_MUCH, "X: " + "x" * 40_000), 431),
        (b"nonsense\r\n\r\n" + FAR_TOO_MUCH, 400),
    ],
    ids=[
        *("early", "early and closing", "early and older", "too large", "too large and closing"),
        *("no chunk", "too large a head", "no HTTP"),
    ],
)
def test_who_sends_all_before_reading_gets_the_answer(
    tmp_path: Path, raw: bytes, status: int
) -> None:
    with live(make_app(tmp_path, FakeEngine())) as server, connect(server) as sock:
        sock.sendall(raw)
        assert answer(sock).status == status


@pytest.mark.parametrize(
    "raw",
    [
        post("/nowhere", bytes(10**6), "Connection: close"),
        post("/nowhere", bytes(10**6)).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    ],
)
def test_once_the_rest_of_a_body_has_come_the_connection_is_closed(
    tmp_path: Path, raw: bytes
) -> None:
    with live(make_app(tmp_path, FakeEngine())) as server, connect(server) as sock:
        sock.sendall(raw[:-1])
        assert answer(sock).status == 404
        sock.sendall(raw[-1:])
        until(lambda: server.num_connections == 0)


@pytest.mark.parametrize(
    "raw", [b"nonsense\r\n\r\n", post(CHAT, b"zz\r\n", "Transfer-Encoding: chunked")]
)
def test_what_comes_behind_a_refusal_is_read_for_so_long_and_no_longer(
    tmp_path: Path, raw: bytes
) -> None:
    wire = WireLimits(discarding_s=0.2, discarded_bytes=10**6)
    with live(make_app(tmp_path, FakeEngine()), wire=wire) as server:
        with connect(server) as silent:
            silent.sendall(raw)
            until(lambda: server.num_connections == 0)
        with connect(server) as endless, pytest.raises((ConnectionResetError, BrokenPipeError)):
            endless.sendall(raw + bytes(10**8))


def test_a_continue_is_sent_only_where_the_body_is_wanted(server: HttpServer) -> None:
    with connect(server) as sock:
        sock.sendall(post("/nowhere", b"", "Content-Length: 10", "Expect: 100-continue"))
        assert sock.recv(12) == b"HTTP/1.1 404"
    with connect(server) as sock:
        head = post(CHAT, b"", f"Content-Length: {len(BODY)}", "Expect: 100-continue")
        sock.sendall(head)
        assert sock.recv(25, socket.MSG_WAITALL) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(BODY)
        assert answer(sock).status == 200


def test_stray_line_ends_between_requests_do_no_harm(server: HttpServer) -> None:
    with connect(server) as sock:
        for _ in range(3):
            sock.sendall(post("/tokenize", b'{"model":"tiny","prompt":"x"}') + b"\r\n")
            assert answer(sock).status == 200


def test_a_response_cannot_be_split_by_a_request_id(server: HttpServer) -> None:
    head = b"GET /livez HTTP/1.1\r\nHost: t\r\nConnection: close\r\n"
    response = sent(server, head + b"X-Request-Id: a%0d%0aX: y\r\n\r\n")
    assert response.startswith(b"HTTP/1.1 200")
    assert b"x: y" not in response.lower()


@pytest.mark.parametrize("upgrade", ["websocket", "h2c"])
def test_upgrades_are_not_taken(server: HttpServer, upgrade: str) -> None:
    head = f"GET /livez HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: {upgrade}\r\n\r\n"
    with connect(server) as sock:
        sock.sendall(head.encode())
        assert answer(sock).status == 200


@pytest.mark.parametrize("num_trailers", [1, 500])
def test_what_follows_a_body_is_no_header(tmp_path: Path, num_trailers: int) -> None:
    app = make_app(tmp_path, FakeEngine(), api_key=("secret",))
    trailers = b"Authorization: Bearer secret\r\nX-Api-Key: secret\r\n"
    trailers += b"".join(b"X-%d: a\r\n" % number for number in range(num_trailers))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += b"Connection: close\r\nTransfer-Encoding: chunked\r\n"
    body = b"\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
    with live(app) as server:
        assert sent(server, head + body + trailers + b"\r\n").startswith(b"HTTP/1.1 401")
        keyed = head + b"Authorization: Bearer secret\r\n"
        assert sent(server, keyed + body + trailers + b"\r\n").startswith(b"HTTP/1.1 200")


def test_a_protocol_that_is_not_offered_is_not_logged(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    upgrade = b"Connection: Upgrade, close\r\nUpgrade: websocket\r\n"
    reply = sent(server, b"GET /livez HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n")
    assert reply.startswith(b"HTTP/1.1 200")
    assert "websocket" not in caplog.text.lower()
