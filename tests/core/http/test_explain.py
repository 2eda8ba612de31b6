"""Where a request went: found by its id, in front of replicas; nothing without them."""

from __future__ import annotations

import httpx

from support.http import FakeEngine, in_process
from triptych.core.engine_api.client import EngineClient
from triptych.core.http.app import create_app
from triptych.core.options.config import Config
from triptych.core.router.client import ReplicatedClient
from triptych.core.router.request import RouteChoice, RoutedRequest


class Explaining(ReplicatedClient):
    """Knows of one call, of two jobs."""

    def __init__(self) -> None:
        choices = [RouteChoice("a", 1.0, 0.5, 64, 0.25), RouteChoice("b", 0.5, 0.5)]
        routed = RoutedRequest("chat", num_tokens=100, choices=choices)
        self._routed = {"abc.0": routed, "abc.1": routed, "abcd.0": routed}


async def get(client: EngineClient, request_id: str) -> httpx.Response:
    app = create_app(Config(), client, [], [])
    async with in_process(app) as http:
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
