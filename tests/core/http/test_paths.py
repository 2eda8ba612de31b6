"""HEAD, methods that a path does not have, and names that lead nowhere."""

from __future__ import annotations

from dataclasses import replace
from http.client import HTTPResponse
from pathlib import Path

import pytest

from support.full_app import FullApp, open_full_app
from support.http import READY, FakeEngine, connect, in_process, live, make_app
from triptych.core.transport.messages import ModelStatus


@pytest.fixture(scope="module")
def full_app(tmp_path_factory: pytest.TempPathFactory) -> FullApp:
    return open_full_app(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("path", ["/readyz", "/livez", "/version", "/v1/models", "/v1/models/tiny"])
async def test_head_is_get_without_a_body(full_app: FullApp, path: str) -> None:
    async with in_process(full_app.app) as client:
        got, head = await client.get(path), await client.head(path)
    volatile = {"x-request-id", "date"}
    assert head.status_code == got.status_code == 200
    assert {k: v for k, v in head.headers.items() if k not in volatile} == {
        k: v for k, v in got.headers.items() if k not in volatile
    }
    assert head.content == b""


async def test_head_is_counted_by_its_route(full_app: FullApp) -> None:
    async with in_process(full_app.app) as client:
        await client.head("/v1/models/tiny")
        metrics = (await client.get("/metrics")).text
    assert 'route="/v1/models/{name:path}",status="200"' in metrics.replace(" ", "")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("OPTIONS", "/v1/audio/voices", "GET, HEAD, POST"),
        ("PUT", "/v1/audio/voices/x", "DELETE, GET, HEAD"),
        ("GET", "/v1/chat/completions", "POST"),
        ("HEAD", "/v1/embeddings", "POST"),
        ("DELETE", "/v1/models/org/model", "GET, HEAD"),
        ("POST", "/openapi.json", "GET, HEAD"),
        ("POST", "/livez", "GET, HEAD"),
    ],
)
async def test_a_405_names_all_methods(
    full_app: FullApp, method: str, path: str, allowed: str
) -> None:
    async with in_process(full_app.app) as client:
        reply = await client.request(method, path)
    assert (reply.status_code, reply.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/tiny%0a",
        "/v1/models/tiny%0A",
        "/v1/models/ti%00ny",
        "/v1/models/tiny%7f",
        "/v1/models/tiny%c2%85",
        "/v1/models/tiny%e2%80%a8",
        "/livez%0a",
        "/v1/audio/voices/ada%0a",
        "/v1/images/files/x%0d",
    ],
)
async def test_control_characters_lead_nowhere(full_app: FullApp, path: str) -> None:
    async with in_process(full_app.app) as client:
        reply = await client.get(path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")


async def test_probes_name_models_only_to_those_with_a_key(tmp_path: Path) -> None:
    ready = ModelStatus(model="tiny", state="ready", progress=1.0)
    engine = FakeEngine(state=replace(READY, models=(ready,)))
    app = make_app(tmp_path, engine, api_key=("right",))
    async with in_process(app) as client:
        for path in ("/livez", "/readyz", "/health"):
            for header in ({}, {"authorization": "Bearer wrong"}):
                reply = await client.get(path, headers=header)
                assert (reply.status_code, reply.json()["models"]) == (200, [])
            reply = await client.get(path, headers={"authorization": "Bearer right"})
            assert reply.json()["models"][0]["model"] == "tiny"
    async with in_process(make_app(tmp_path, engine)) as client:
        assert (await client.get("/readyz")).json()["models"][0]["model"] == "tiny"


def test_head_over_a_socket_has_no_body(tmp_path: Path) -> None:
    with live(make_app(tmp_path, FakeEngine())) as server, connect(server) as sock:
        for _ in range(2):  # a body would be read as the next answer's beginning
            sock.sendall(b"HEAD /readyz HTTP/1.1\r\nHost: t\r\n\r\n")
            response = HTTPResponse(sock, method="HEAD")
            response.begin()
            assert response.status == 200
            assert int(response.headers["content-length"]) > 0
