"""HEAD, methods that a path does not have, and names that lead nowhere."""

from __future__ import annotations

from dataclasses import replace
from http.client import HTTPResponse
from pathlib import Path

import pytest

from support.full_app import FullApp, open_full_app
from support.http import READY, FakeEngine, connect, in_process, live, make_app
from triptych.core.engine_api.reports import ModelStatus


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
        ("PUT", "/v1/models/org/model", "DELETE, GET, HEAD"),
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


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/models/tiny",
        "/v1/audio/voices",
        "/v1/audio/models",
        "/v1/files",
        "/v1/responses/resp_none",
        "/v1/engine/explain/none",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/nothing",
    ],
)
async def test_the_version_may_be_left_out_of_a_path(full_app: FullApp, path: str) -> None:
    volatile = {"x-request-id", "request-id", "date"}
    async with in_process(full_app.app) as client:
        for ask in (client.get, client.delete, client.head):
            whole, short = await ask(path), await ask(path.removeprefix("/v1"))
            assert short.status_code == whole.status_code
            kept = [
                {name: value for name, value in reply.headers.items() if name not in volatile}
                for reply in (whole, short)
            ]
            assert kept[0] == kept[1]


async def test_a_short_path_is_counted_and_answered_as_the_whole_one(full_app: FullApp) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with in_process(full_app.app) as client:
        reply = await client.post("/chat/completions", json=asked)
        error = await client.post("/messages", json={**asked, "max_tokens": -1})
        metrics = (await client.get("/metrics")).text
    assert reply.json()["object"] == "chat.completion"
    assert error.json()["type"] == "error"  # Anthropic's
    assert 'route="/v1/chat/completions",status="200"' in metrics.replace(" ", "")


async def test_a_path_of_its_own_is_no_short_one(full_app: FullApp) -> None:
    async with in_process(full_app.app) as client:
        for path in ("/docs", "/v1/metrics", "/v1/readyz", "/v1", "/v1/v1/models"):
            assert (await client.get(path)).status_code == 404, path


async def test_short_paths_need_a_key_too(tmp_path: Path) -> None:
    async with in_process(make_app(tmp_path, FakeEngine(), api_key=("right",))) as client:
        assert (await client.get("/models")).status_code == 401
        headers = {"authorization": "Bearer right"}
        assert (await client.get("/models", headers=headers)).status_code == 200


async def test_probes_name_models_only_to_those_with_a_key(tmp_path: Path) -> None:
    ready = ModelStatus(model="tiny", state="ready", progress=1.0)
    engine = FakeEngine(state=replace(READY, models=(ready,)))
    app = make_app(tmp_path, engine, api_key=("right",))
    async with in_process(app) as client:
        for path in ("/livez", "/readyz", "/health", "/v1/health", "/ping"):
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


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/llm/v1/models", 200),
        ("/llm/models", 200),
        ("/v1/models", 200),
        ("/llm/livez", 200),
        ("/llm", 307),
        ("/llm/", 404),
        ("/llmx/v1/models", 404),
        ("/llm/llm/v1/models", 404),
    ],
)
async def test_a_root_path_is_optional(tmp_path: Path, path: str, status: int) -> None:
    async with in_process(make_app(tmp_path, FakeEngine(), root_path="/llm")) as client:
        assert (await client.get(path)).status_code == status


async def test_a_root_path_opens_no_route_without_a_key(tmp_path: Path) -> None:
    app = make_app(tmp_path, FakeEngine(), root_path="/llm", api_key=("right",))
    async with in_process(app) as client:
        assert (await client.get("/llm/v1/models")).status_code == 401
        assert (await client.get("/llm/livez")).status_code == 200
        document = await client.get("/llm/openapi.json", headers={"x-api-key": "right"})
    assert document.json()["servers"] == [{"url": "/llm"}]
