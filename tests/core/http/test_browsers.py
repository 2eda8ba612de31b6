"""A server without keys and the pages of other sites, in a browser."""

from __future__ import annotations

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from support.http import FakeEngine, in_process
from triptych.core.http.app import create_app
from triptych.core.options.config import Config, ServerOptions

HOST = "127.0.0.1:8000"


def app(**server: object) -> FastAPI:
    router = APIRouter()

    @router.post("/change")
    @router.get("/change")
    def change() -> dict[str, bool]:
        return {"is_done": True}

    config = Config(server=ServerOptions(**server))  # type: ignore[arg-type]
    return create_app(config, FakeEngine(), [router])


async def status(method: str, headers: dict[str, str], **server: object) -> int:
    async with in_process(app(**server)) as client:
        reply = await client.request(method, "/change", headers=headers)
    if reply.status_code == 403:
        assert reply.json()["error"]["code"] == "foreign_site"
        assert "--" in reply.json()["error"]["message"], "it says what to set"
    return int(reply.status_code)


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "a.b",
    ],
)
async def test_no_foreign_name_is_answered(method: str, host: str) -> None:
    assert await status(method, {"host": host}) == 403


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LOCALHOST", "127.0.0.1", "127.0.0.1:1", "[::1]:8000"),
        *("192.168.1.7:8000", "triptych:8000", "gpu-box.local", "triptych.default.svc"),
        "triptych.default.svc.cluster.local:8000",
    ],
)
async def test_addresses_and_private_names_are_answered(host: str) -> None:
    assert await status("GET", {"host": host}) == 200
    assert await status("POST", {"host": host, "origin": f"http://{host}"}) == 200


async def test_names_that_an_operator_gives_are_answered() -> None:
    headers = {"host": "ai.example:443"}
    assert await status("POST", headers, allowed_host=("AI.example",)) == 200
    assert await status("POST", headers, public_url="https://ai.example") == 200
    assert await status("POST", headers, host="ai.example") == 200
    assert await status("POST", headers, cors_origin=("https://ai.example",)) == 200
    assert await status("POST", headers, allowed_host=("other.example",)) == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9000"},
        {"origin": f"http://{HOST}.evil.example"},
        {"origin": "http://["},
        {"origin": "https://[::1"},
        {"origin": "http:"},
        {"sec-fetch-site": "cross-site"},
    ],
)
@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "text/plain", ""])
async def test_a_page_of_another_site_changes_nothing(headers: dict[str, str], kind: str) -> None:
    given = {"host": HOST, "content-type": kind, **headers}
    assert await status("POST", given) == 403
    assert await status("DELETE", given) == 403
    assert await status("GET", given) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"origin": "app://obsidian.md"},
        {"origin": "vscode-webview://0a1b"},
    ],
)
async def test_own_pages_and_programs_are_served(headers: dict[str, str]) -> None:
    assert await status("POST", {"host": HOST, **headers}) == 200


async def test_an_origin_that_is_let_in_is_served() -> None:
    headers = {"host": HOST, "origin": "https://app.example", "sec-fetch-site": "cross-site"}
    assert await status("POST", headers, cors_origin=("https://app.example",)) == 200
    assert await status("POST", headers, cors_origin=("*",)) == 200
    assert await status("POST", headers, cors_origin=("https://other.example",)) == 403


@pytest.mark.parametrize(
    "name",
    [
        *("request-id", "x-request-id", "retry-after", "x-should-retry", "x-triptych-ignored"),
        *("x-prompt-truncated", "x-speech-coverage", "x-speech-sample-rate"),
    ],
)
async def test_a_page_that_is_let_in_may_read_what_answers_say_in_headers(name: str) -> None:
    async with in_process(app(cors_origin=("https://app.example",))) as client:
        reply = await client.get("/change", headers={"origin": "https://app.example"})
    assert name in reply.headers["access-control-expose-headers"].split(", ")


@pytest.mark.parametrize(
    "options", [{"allowed_host": ("ai.example",)}, {"public_url": "https://ai.example/x"}]
)
async def test_a_proxy_may_rewrite_the_host(options: dict[str, object]) -> None:
    headers = {"host": "127.0.0.1:8000", "origin": "https://ai.example"}
    assert await status("POST", headers, **options) == 200
    assert await status("POST", headers | {"origin": "https://evil.example"}, **options) == 403
    assert await status("POST", headers | {"origin": "null"}, **options) == 403


async def test_with_keys_any_name_will_do() -> None:
    headers = {"host": "evil.example", "origin": "http://evil.example"}
    async with in_process(app(api_key=("secret",))) as client:
        assert (await client.post("/change", headers=headers)).status_code == 401
        headers["authorization"] = "Bearer secret"
        reply: httpx.Response = await client.post("/change", headers=headers)
        assert reply.status_code == 200
