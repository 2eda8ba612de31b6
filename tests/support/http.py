"""Fakes of the HTTP side: an engine client that makes tokens up, and a server on a thread."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.types import ASGIApp

from support.shared_validators import share_validators
from support.text_models import byte_tokenizer, write_text_folder
from triptych.core.engine_api.client import EngineStatus
from triptych.core.engine_api.job import Output
from triptych.core.engine_api.journal import JobJournal
from triptych.core.engine_api.model_changes import ModelChange
from triptych.core.engine_api.tokens import TokenDelta, TokenLogprob, TokenRequest
from triptych.core.http.app import create_app
from triptych.core.http.page import Pages, PagesRouter
from triptych.core.http.server import HttpServer, serve
from triptych.core.http.wire import WireLimits
from triptych.core.options.config import Config, ModelOptions, ScheduleOptions, ServerOptions
from triptych.modalities.llm.api.replies import card_of
from triptych.modalities.llm.api.routes import llm_router
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.text import TextModel
from triptych.schedulers.admission import Admission

share_validators()
_LEAK = re.compile(r"0x[0-9a-f]{9}|Traceback|/usr|/tmp|PIL|\.py|BytesIO")
ANSWER = "The quick brown fox jumps over the lazy dog."
READY = EngineStatus(
    is_ready=True,
    is_alive=True,
    is_draining=False,
    beat_age_s=0.1,
    num_restarts=0,
    models=(),
    last_beat=None,
)


@dataclass
class FakeEngine:
    """An engine client: every job says `answer`, a byte a step, from its sample's index on.

    `error` is raised after `num_good` tokens; jobs wait for `gate` before each token; `step_s` is
    the time between tokens. Remembers what became of every job.
    """

    answer: str = ANSWER
    error: Exception | None = None
    num_good: int = 0
    step_s: float = 0.0
    is_endless: bool = False
    gate: threading.Event | None = None
    state: EngineStatus = READY
    submitted: dict[str, TokenRequest] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)
    deadlines_s: list[float | None] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    num_steps: int = 0
    journal: JobJournal = field(default_factory=JobJournal)
    unloaded: list[str] = field(default_factory=list)
    changes: list[ModelChange] = field(default_factory=list)

    def __post_init__(self) -> None:
        tokenizer = byte_tokenizer()
        self._ids = [tokenizer.encode(chr(byte)).ids[0] for byte in range(128)]

    @property
    def running(self) -> set[str]:
        return set(self.submitted) - {*self.finished, *self.cancelled}

    async def submit(
        self,
        model: str,
        request: Any,
        *,
        job_id: str,
        deadline_s: float | None = None,
        client: str = "",
    ) -> AsyncGenerator[Output, None]:
        self.submitted[job_id] = request
        self.models.append(model)
        self.deadlines_s.append(deadline_s)
        ended = False
        try:
            async for delta in self._deltas(request):
                ended = delta.finish_reason is not None
                yield Output(job_id=job_id, payload=delta, is_final=ended)
        finally:
            (self.finished if ended else self.cancelled).append(job_id)

    async def _deltas(self, request: TokenRequest) -> AsyncGenerator[TokenDelta, None]:
        sampling = request.sampling
        text = self.answer.encode()
        num = 0
        while num < sampling.max_tokens and (self.is_endless or num < len(text)):
            while self.gate is not None and not self.gate.is_set():  # noqa: ASYNC110 - other thread
                await asyncio.sleep(0.005)
            await asyncio.sleep(self.step_s)
            if self.error is not None and num >= self.num_good:
                raise self.error
            self.num_steps += 1
            token = self._ids[text[(num + sampling.sample_index) % len(text)]]
            yield TokenDelta(
                token_ids=(token,),
                logprobs=_logprobs(token, sampling.top_logprobs),
                prompt_logprobs=_prompt_logprobs(request) if num == 0 else (),
                num_cached_tokens=1,
            )
            num += 1
        if self.error is not None:
            raise self.error
        reason = "length" if num == sampling.max_tokens else "stop"
        yield TokenDelta(finish_reason=reason, num_cached_tokens=1)

    def status(self) -> EngineStatus:
        return self.state

    async def load(self, model: str) -> None: ...

    async def unload(self, model: str) -> None:
        self.unloaded.append(model)

    async def change(self, change: ModelChange) -> None:
        self.changes.append(change)

    async def close(self) -> None: ...


def _logprobs(token: int, top: int | None) -> tuple[TokenLogprob, ...]:
    if top is None:
        return ()
    others = tuple((token - n, -0.25 - n) for n in range(top))
    return (TokenLogprob(token, -0.25, others),)


def _prompt_logprobs(request: TokenRequest) -> tuple[TokenLogprob, ...]:
    if not request.sampling.prompt_logprobs:
        return ()
    return tuple(TokenLogprob(token, -1.0, ((token, -1.0),)) for token in request.prompt_ids[1:])


def make_service(
    folder: Path, engine: FakeEngine, models: ModelOptions | None = None, **schedule: int
) -> LlmService:
    """A text service in front of `engine`, with the byte tokenizer."""
    resolved = write_text_folder(folder, max_position_embeddings=4096)
    model = TextModel.open(resolved, models or ModelOptions())
    return LlmService(engine, [model], Admission(options=ScheduleOptions(**schedule)))


def make_app(
    folder: Path,
    engine: FakeEngine,
    *,
    schedule: dict[str, int] | None = None,
    models: ModelOptions | None = None,
    pages: Pages | None = None,
    **server: Any,
) -> FastAPI:
    """The whole app in front of `engine`, with `pages` for browsers."""
    service = make_service(folder, engine, models, **(schedule or {}))
    cards = [card_of(model) for model in service.models.values()]
    config = Config(server=ServerOptions(**server))
    routers = [llm_router(service), *([PagesRouter(pages)] if pages else [])]
    return create_app(config, engine, routers, cards)


@contextmanager
def live(app: FastAPI, *, wire: WireLimits | None = None) -> Iterator[HttpServer]:
    """`app` behind a real socket, on a loop of its own thread."""
    config = Config(server=replace(app.state.options, port=0, drain_timeout_s=2.0))
    started = threading.Event()
    servers: list[tuple[HttpServer, asyncio.AbstractEventLoop]] = []

    def on_started(server: HttpServer) -> None:
        servers.append((server, asyncio.get_running_loop()))
        started.set()

    def run() -> None:
        asyncio.run(serve(app, config, on_started=on_started, wire=wire))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(10)
    server, loop = servers[0]
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join(20)
        assert not thread.is_alive()


@asynccontextmanager
async def in_process(app: ASGIApp, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client that calls `app` directly, without a socket."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://t", headers=headers
    ) as client:
        yield client


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


def documents(stream: str) -> list[Any]:
    """The JSON documents of an event stream, and `[DONE]` as it is."""
    data = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]


def until(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    """Wait until `condition` holds; fail if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def connect(server: HttpServer) -> socket.socket:
    """A raw connection to `server`."""
    host, port = server.url.partition("://")[2].rsplit(":", 1)
    sock = socket.create_connection((host, int(port)), timeout=15)
    return sock


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes; a reset ends it, too."""
    data = b""
    try:
        while chunk := sock.recv(65536):
            data += chunk
    except ConnectionResetError:
        pass
    return data


def answer(sock: socket.socket) -> HTTPResponse:
    """One answer, its body read and thrown away, with the connection left open."""
    response = HTTPResponse(sock)
    response.begin()
    response.read()
    return response


def ask(url: str, path: str, **request: Any) -> httpx.Response:
    """POST once, on a connection of its own."""
    with httpx.Client(base_url=url, verify=False, timeout=30) as client:  # skips loading CAs
        return client.post(path, **request)


def refused(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer: it has a code and the id of its request, and leaks nothing."""
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert error["request_id"] == reply.headers["x-request-id"]
    assert error["code"]
    assert not _LEAK.search(error["message"])
    return error


def post(path: str, body: bytes, *headers: str) -> bytes:
    """The bytes of a POST request."""
    lines = [f"POST {path} HTTP/1.1", "Host: t", "Content-Type: application/json", *headers]
    if not any(header.lower().startswith(("content-length", "transfer-")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body
