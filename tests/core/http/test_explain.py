"""Where a request went: told by its id, in front of replicas; nothing without them."""

from __future__ import annotations

import httpx
from fastapi import FastAPI

from support.http import FakeEngine
from triptych.core.errors import TriptychError
from triptych.core.http.errors import handle_error
from triptych.core.http.explain import explain_router
from triptych.core.router.client import ReplicatedClient
from triptych.core.router.request import RouteChoice, RoutedRequest


class Explaining(ReplicatedClient):
    """Knows of one call, of two jobs."""

    def __init__(self) -> None:
        choices = [RouteChoice("a", 1.0, 0.5, 64, 0.25), RouteChoice("b", 0.5, 0.5)]
        routed = RoutedRequest("chat", num_tokens=100, choices=choices)
        self._routed = {"abc.0": routed, "abc.1": routed, "abcd.0": routed}


async def get(client: object, request_id: str) -> httpx.Response:
    app = FastAPI()
    app.include_router(explain_router(client))  # type: ignore[arg-type]
    app.add_exception_handler(TriptychError, handle_error)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        return await http.get(f"/v1/engine/explain/{request_id}")


async def test_every_job_of_a_request_is_explained() -> None:
    found = (await get(Explaining(), "req-abc")).json()
    assert [job["job_id"] for job in found["jobs"]] == ["abc.0", "abc.1"]
    first, second = found["jobs"][0]["replicas"]
    assert first == {
        "replica": "a",
        "wait_s": 1.0,
        "least_wait_s": 0.5,
        "cached_tokens": 64,
        "saved_s": 0.25,
    }
    assert second["replica"] == "b"
    assert found["jobs"][0]["prompt_tokens"] == 100


async def test_what_is_not_known_is_a_404_that_says_so() -> None:
    unknown = await get(Explaining(), "mine")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    alone = await get(FakeEngine(), "req-abc")
    assert alone.status_code == 404
    assert "one engine" in alone.json()["error"]["message"]
