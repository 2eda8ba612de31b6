"""A small OpenAI-compatible server with scripted answers, on 127.0.0.1."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeServer:
    """How to answer; `piece` is the field of a delta with text.

    Each request body is kept in `requests`, `peak` counts those at once; `keys` are the
    authorizations of all requests.
    """

    refused_fields: tuple[str, ...] = ()
    fail_every: int = 0
    failure: str = "429"
    has_tokenize: bool = True
    has_done: bool = True
    piece: str = "content"
    keys: set[str | None] = field(default_factory=set)
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_active: int = 0
    peak: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def enter(self, body: dict[str, Any]) -> bool:
        """Count a request; True where this one is to fail."""
        with self.lock:
            self.requests.append(body)
            self.num_active += 1
            self.peak = max(self.peak, self.num_active)
            return bool(self.fail_every) and len(self.requests) % self.fail_every == 0

    def leave(self) -> None:
        """Count a request as answered."""
        with self.lock:
            self.num_active -= 1


def _event(content: str) -> bytes:
    return f"data: {content}\n\n".encode()


def _stream(fake: FakeServer, body: dict[str, Any]) -> Iterator[bytes]:
    count = body["max_tokens"]
    yield _event(json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
    for _ in range(count):
        chat = {"delta": {fake.piece: "word "}}
        yield _event(json.dumps({"choices": [chat if "messages" in body else {"text": "word "}]}))
    if body.get("stream_options"):
        usage = {
            "prompt_tokens": 10,
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        yield _event(json.dumps({"choices": [], "usage": usage}))
    yield _event(json.dumps({"choices": [{"delta": {}, "finish_reason": "length"}]}))
    if fake.has_done:
        yield _event("[DONE]")


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def do_GET(self) -> None:
        self.fake.keys.add(self.headers["authorization"])
        self._json(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        self.fake.keys.add(self.headers["authorization"])
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            found = self.fake.has_tokenize
            self._json(200 if found else 404, {"tokens": body["prompt"].split() * 2})
            return
        is_failing = self.fake.enter(body)
        try:
            self._answer(body, is_failing=is_failing)
        finally:
            self.fake.leave()

    def _answer(self, body: dict[str, Any], *, is_failing: bool) -> None:
        if set(body) & set(self.fake.refused_fields):
            self._json(400, {"error": {"message": "unknown field"}})
        elif not is_failing:
            self._events(_stream(self.fake, body))
        elif self.fake.failure == "429":
            self._json(429, {"error": {"message": "later"}})
        else:
            broken = {
                "cut": [_event('{"choices": [{"delta": {"content": "a"}}]}')],
                "error": [_event('{"error": {"code": "engine_down"}}'), _event("[DONE]")],
                "malformed": [_event("{")],
                "empty": [_event("[DONE]")],
            }
            self._events(iter(broken[self.fake.failure]))

    def _events(self, events: Iterator[bytes]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in events:
            self.wfile.write(event)
            self.wfile.flush()

    def _json(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


@contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """Run `fake` until the block ends; `fake.url` says where."""
    handler = type("_BoundHandler", (_Handler,), {"fake": fake})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
