"""Faults a caller of images can cause."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.child_processes import decoders
from support.http import ask, connect, live, post, refused, until
from support.image_app import (
    EDITS,
    GENERATIONS,
    VARIATIONS,
    FakeImageEngine,
    generation,
    image_model,
    make_image_app,
    make_image_service,
    opened,
)
from support.images import hole_mask, hostile, image, saved
from support.tiers import first
from triptych.core.errors import NonFinite
from triptych.core.http.server import HttpServer
from triptych.core.http.wire import WireLimits
from triptych.core.media import images
from triptych.core.media.child import DecodePool
from triptych.core.media.images import ImageReader

PNG = saved(image(128, 128))
HOSTILE = hostile()
TRAVERSALS = ("../../../../tmp/evil.png", "/etc/passwd", "a\x00b.png", "n" * 4000, "..", "C:\\x")


@contextlib.contextmanager
def surviving(engine: FakeImageEngine, **server: Any) -> Iterator[HttpServer]:
    """A live server; whatever is done to it, it must still generate and edit afterwards."""
    pool = DecodePool([images.__name__])
    models = (image_model(), image_model("looks", max_references=16))
    service = make_image_service(engine, *models, reader=ImageReader(pool), max_batch_size=64)
    app = make_image_app(engine, service, max_upload_bytes=4 * 2**20, **server)
    with live(app, wire=WireLimits(linger_s=0.5)) as running:
        yield running
        engine.gate, engine.error, engine.step_s = None, None, 0.0
        assert ask(running.url, GENERATIONS, json=generation()).status_code == 200
        assert sent(running, image=PNG).status_code == 200
        until(lambda: not engine.running)
        assert len(engine.table) == 0
        assert service._images.held == 0
    asyncio.run(pool.close())


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpServer]:
    """One server for everything that never reaches the engine."""
    engine = FakeImageEngine()
    with surviving(engine) as server:
        yield server
        assert engine.submitted == {}


def sent(
    server: HttpServer,
    path: str = EDITS,
    media_type: str = "application/octet-stream",
    filename: str = "a",
    mask: bytes | None = None,
    **files: bytes,
) -> httpx.Response:
    """Post a form with images."""
    parts = {name: (filename, data, media_type) for name, data in files.items()}
    if mask is not None:
        parts["mask"] = ("m", mask, "application/octet-stream")
    fields = {} if path == VARIATIONS else {"prompt": "a hat"}
    return ask(server.url, path, data=fields, files=parts)


@pytest.mark.parametrize("name", HOSTILE)
def test_to_17_hostile_images_are_refused(shared: HttpServer, name: str) -> None:
    data, status = HOSTILE[name]
    before_s = time.process_time()
    for path in (EDITS, VARIATIONS):
        assert refused(sent(shared, path, image=data), status)["param"] == "image"
    assert time.process_time() - before_s < 2.0  # of this process: nothing is decoded in it
    assert refused(sent(shared, image=PNG, mask=data), status)["param"] == "mask"


@pytest.mark.parametrize("claimed", ["text/plain", "application/pdf"])
def test_an_image_that_is_not_what_it_is_sent_as(shared: HttpServer, claimed: str) -> None:
    error = refused(sent(shared, media_type=claimed, image=PNG), 415)
    assert "image/png" in error["message"]


@pytest.mark.parametrize(
    "size", ["1023x7", "20000x20000", "99999x16", "16x16", "8192x8192", "130x128", "512x128"]
)
def test_sizes_that_cannot_be_generated(shared: HttpServer, size: str) -> None:
    reply = ask(shared.url, GENERATIONS, json=generation(size=size))
    assert refused(reply, 400)["param"] == "size"
    fields = {"prompt": "x", "size": size}
    reply = ask(shared.url, EDITS, data=fields, files={"image": ("a.png", PNG, "image/png")})
    assert refused(reply, 400)["param"] == "size"


def test_a_mask_of_another_size(shared: HttpServer) -> None:
    mask = hole_mask(64, 64, (0, 0, 9, 9))
    assert refused(sent(shared, image=PNG, mask=mask), 400)["param"] == "mask"


@pytest.mark.parametrize("steps", [0, -1, 10_000, 2**70, 1.5, "10", True])
def test_steps_out_of_range(shared: HttpServer, steps: Any) -> None:
    reply = ask(shared.url, GENERATIONS, json=generation(steps=steps))
    assert refused(reply, 400)["param"] == "steps"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(shared: HttpServer, number: str) -> None:
    raw = json.dumps(generation(guidance=1234)).replace("1234", number)
    headers = {"content-type": "application/json"}
    reply = ask(shared.url, GENERATIONS, content=raw.encode(), headers=headers)
    refused(reply, 400)


def test_names_of_files_go_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = FakeImageEngine()
    before = set(Path("/tmp").iterdir())
    with surviving(engine) as server:
        for filename in TRAVERSALS:
            reply = sent(server, filename=filename, image=PNG)
            assert reply.status_code in (200, 400, 413), reply.text
        for name in ("..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e", "a" * 43 + ".png", "x\x00.png"):
            path = "/v1/images/files/" + name.replace("\x00", "%00")
            assert httpx.get(server.url + path).status_code in (400, 404)
    assert list(tmp_path.iterdir()) == []
    new = {path for path in set(Path("/tmp").iterdir()) - before if "evil" in path.name}
    assert new == set()


@pytest.mark.parametrize("is_reset", first([True, False]))
@pytest.mark.parametrize("stage", ["waiting", "running"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_leaves_stops_its_images(
    is_streamed: bool, stage: str, is_reset: bool
) -> None:
    engine = FakeImageEngine(step_s=0.01, gate=threading.Event())
    assert engine.gate is not None
    if stage == "running":
        engine.gate.set()
    with surviving(engine) as server:
        sock = connect(server)
        body = generation(stream=is_streamed, progress=is_streamed, steps=1000, n=4)
        sock.sendall(post(GENERATIONS, json.dumps(body).encode()))
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


def test_a_client_that_leaves_while_its_images_are_read() -> None:
    engine = FakeImageEngine()
    big = saved(image(3000, 3000), compress_level=0)[: 3 * 2**20]  # decoding it fails, slowly
    form = b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx\r\n'
    form += b'--b\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
    form += big + b"\r\n--b--\r\n"
    with surviving(engine) as server:
        for _ in range(4):
            sock = connect(server)
            head = post(EDITS, form, f"Content-Length: {len(form)}")
            kind = b"Content-Type: multipart/form-data; boundary=b"
            sock.sendall(head.replace(b"Content-Type: application/json", kind))
            time.sleep(0.02)
            sock.close()
        until(lambda: not server.num_connections)
        assert engine.submitted == {}


def test_overload_says_when_to_come_back() -> None:
    engine = FakeImageEngine(gate=threading.Event())
    service = make_image_service(engine, max_queue_size=2, max_batch_size=2)
    with live(make_image_app(engine, service)) as server:
        socks = [connect(server) for _ in range(2)]
        for sock in socks:
            sock.sendall(post(GENERATIONS, json.dumps(generation(n=2)).encode()))
        until(lambda: len(engine.running) == 2)
        for _ in range(10):
            reply = ask(server.url, GENERATIONS, json=generation())
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "overloaded")
            assert int(reply.headers["retry-after"]) >= 1
        for sock in socks:
            sock.close()
        until(lambda: not engine.running)
        assert engine.gate is not None
        engine.gate.set()
        assert ask(server.url, GENERATIONS, json=generation()).status_code == 200


def test_an_image_that_turns_to_nothing_costs_itself_alone() -> None:
    engine = FakeImageEngine(error=NonFinite("The image is not a number."), num_good=2)
    with surviving(engine) as server:
        reply = ask(server.url, GENERATIONS, json=generation())
        assert refused(reply, 500)["code"] == "non_finite"


def test_one_child_decodes_whatever_comes(shared: HttpServer) -> None:
    for data, _ in HOSTILE.values():
        sent(shared, image=data)
    (child,) = decoders()
    assert child.memory_info().rss < 64 * 2**20
    assert opened(PNG).size == (128, 128)
