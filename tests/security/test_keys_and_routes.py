"""Every route is either in the frozen public set or closed without a key."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from support.http import FakeEngine, chat, connect, in_process, live, make_app, read_all
from support.other_apis import other_apis_app
from triptych.core.http.auth import PUBLIC_ROUTES

FROZEN_PUBLIC = {
    *itertools.product(
        ("GET", "HEAD"),
        ("/livez", "/readyz", "/health", "/v1/health", "/ping", "/version"),
    ),
}


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Every method and path the app answers, in the document or not."""
    for path, methods in app.openapi()["paths"].items():
        yield from ((method.upper(), path) for method in methods)
    for route in app.routes:
        for method in getattr(route, "methods", None) or ():
            yield method, route.path  # type: ignore[attr-defined]


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    return other_apis_app(tmp_path, FakeEngine(), api_key=("right", "other"))


def test_the_public_set_is_frozen() -> None:
    assert PUBLIC_ROUTES == FROZEN_PUBLIC


async def test_every_other_route_needs_a_key(app: FastAPI) -> None:
    known = set(routes(app))
    assert {("POST", "/v1/chat/completions"), ("GET", "/metrics"), ("GET", "/openapi.json")} < known
    async with in_process(app) as client:
        for method, path in known:
            reply = await client.request(method, path.replace("{name}", "tiny"))
            expected = reply.status_code == 401
            assert expected == ((method, path) not in FROZEN_PUBLIC), (method, path)


async def test_what_does_not_exist_is_closed_too(app: FastAPI) -> None:
    async with in_process(app) as client:
        for path in ("/", "/docs", "/redoc", "/admin", "/livez/", "//livez", "/LIVEZ", "/v1"):
            assert (await client.get(path)).status_code == 401, path
        assert (await client.post("/livez")).status_code == 401
        assert (await client.get("/livez?x=/v1/models")).status_code == 200


@pytest.mark.parametrize(
    "target",
    [
        "/livez/../v1/models",
        "/livez%2f..%2fv1%2fmodels",
        "/livez;/v1/models",
        "/v1/models?/livez",
        "/v1/models#/livez",
        "//livez/v1/models",
        "/%2e%2e/v1/models",
        "http://t/v1/models",
        "http://t/livez/../v1/models",
    ],
)
@pytest.mark.parametrize("host", ["t", "t/livez?", "t/livez#", "/livez", "", "a\\livez"])
def test_no_spelling_of_a_path_or_host_opens_a_route(
    app_server: Any, target: str, host: str
) -> None:
    with connect(app_server) as sock:
        head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        sock.sendall(head.encode())
        assert read_all(sock).startswith((b"HTTP/1.1 401", b"HTTP/1.1 400"))


@pytest.fixture(scope="module")
def app_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    app = make_app(tmp_path_factory.mktemp("app"), FakeEngine(), api_key=("right",))
    with live(app) as server:
        yield server


async def test_two_authorization_headers_do_not_help(app: FastAPI) -> None:
    async with in_process(app) as client:
        headers = [("authorization", "Bearer wrong"), ("authorization", "Bearer right")]
        reply = await client.get("/v1/models", headers=headers)
    assert reply.status_code == 401


async def test_unauthorized_answers_reveal_no_route(app: FastAPI) -> None:
    async with in_process(app) as client:
        there = await client.get("/v1/models")
        absent = await client.get("/v1/nothing")
    assert there.json()["error"] | {"request_id": ""} == absent.json()["error"] | {"request_id": ""}


async def test_forwarded_addresses_are_not_believed(tmp_path: Path) -> None:
    engine = FakeEngine()
    app = make_app(tmp_path, engine, api_key=("right",))
    headers = {"authorization": "Bearer right", "x-forwarded-for": "6.6.6.6"}
    async with in_process(app, **headers) as client:
        for host in ("a", "b"):
            await client.post("/v1/chat/completions", json=chat(), headers={"host": host})
    assert len({request.tenant for request in engine.submitted.values()}) == 1


async def test_each_key_has_a_cache_of_its_own(tmp_path: Path) -> None:
    engine = FakeEngine()
    app = make_app(tmp_path, engine, api_key=("one", "two"))
    async with in_process(app) as client:
        for key in ("one", "two", "one"):
            header = {"authorization": f"Bearer {key}"}
            await client.post("/v1/chat/completions", json=chat(), headers=header)
    first, second, third = (request.tenant for request in engine.submitted.values())
    assert first == third != second
    assert all(len(tenant) == 32 for tenant in (first, second))


async def test_browsers_may_call_from_listed_origins_only(tmp_path: Path) -> None:
    app = make_app(tmp_path, FakeEngine(), cors_origin=("https://ok.example",), api_key=("k",))
    async with in_process(app) as client:
        for origin, allowed in (("https://ok.example", True), ("https://no.example", False)):
            ask = {"origin": origin, "access-control-request-method": "POST"}
            ask["access-control-request-headers"] = "authorization"
            preflight = await client.options("/v1/chat/completions", headers=ask)
            reply = await client.get("/v1/models", headers={"origin": origin})
            assert (preflight.status_code == 200) is allowed
            for answer in (preflight, reply):
                assert ("access-control-allow-origin" in answer.headers) is allowed
            assert reply.status_code == 401


async def test_without_the_option_no_origin_is_allowed(tmp_path: Path) -> None:
    async with in_process(make_app(tmp_path, FakeEngine())) as client:
        reply = await client.get("/v1/models", headers={"origin": "https://ok.example"})
    assert isinstance(reply, httpx.Response)
    assert "access-control-allow-origin" not in reply.headers
