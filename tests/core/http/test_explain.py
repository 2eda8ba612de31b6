"""Where a request's seconds went: found by the id in its response, by its own caller alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.accounts import REPORT, ReportingEngine
from support.http import chat, in_process, make_app
from triptych.core.engine_api.journal import JobJournal
from triptych.core.http import app as http_app
from triptych.core.http.recent_requests import RecentRequests
from triptych.core.router.client import ReplicatedClient
from triptych.core.router.request import RouteChoice, RoutedRequest


class ReplicatedEngine(ReportingEngine, ReplicatedClient):
    """An engine client that knows where it sent jobs."""

    journal = JobJournal()  # in place of the property of `ReplicatedClient`

    async def submit(self, model: str, request: Any, *, job_id: str, **about: Any) -> Any:  # type: ignore[override]
        choices = [RouteChoice("a", 1.0, 0.5, 64, 0.25), RouteChoice("b", 0.5, 0.5)]
        self._routed = {job_id: RoutedRequest("tiny", num_tokens=100, choices=choices)}
        async for output in ReportingEngine.submit(self, model, request, job_id=job_id, **about):
            yield output


async def ask(http: httpx.AsyncClient, **headers: str) -> str:
    answer = await http.post("/v1/chat/completions", json=chat(max_tokens=3), headers=headers)
    assert answer.status_code == 200
    (request_id,) = answer.headers.get_list("x-request-id")
    return request_id


async def test_a_request_is_explained_by_the_account_of_its_job(tmp_path: Path) -> None:
    async with in_process(make_app(tmp_path, ReportingEngine())) as http:
        request_id = await ask(http)
        found = (await http.get(f"/v1/engine/explain/{request_id}")).json()
    (job,) = found.pop("jobs")
    assert (found["request_id"], found["route"]) == (request_id, "/v1/chat/completions")
    assert found["status"] == 200
    assert 0 <= found["prepare_s"] <= found["length_s"]
    assert 0 <= found["finish_s"] <= found["length_s"]
    assert job.pop("submitted_s") == found["prepare_s"]
    assert job.pop("job_id").startswith(request_id.removeprefix("req-"))
    assert job == {
        "model": "tiny",
        "state": "finished",
        "error": "",
        "arrival_s": 50.0,
        "length_s": 4.0,
        "first_output_s": 2.5,
        "seconds": {
            "queue": 1.0,
            "preempted": 0.5,
            "prefill": 0.75,
            "decode": 1.5,
            "between_steps": 0.25,
        },
        "jobs_ahead": 3,
        "waited_behind": [{"model": "other", "kind": "denoise", "busy_s": 1.25}],
        "sat_out": {"cache_pages": 2},
        "stages": [
            {
                "stage": "prefill",
                "start_s": 1.0,
                "end_s": 2.0,
                "busy_s": 0.75,
                "num_steps": 3,
                "num_shared": 0,
            },
            {
                "stage": "decode",
                "start_s": 2.0,
                "end_s": 4.0,
                "busy_s": 1.5,
                "num_steps": 9,
                "num_shared": 4,
            },
        ],
        "counts": {"prompt_tokens": 20, "cached_tokens": 16},
        "skipped_steps": [{"image": 0, "steps": [1, 2]}],
        "replicas": [],
    }


async def test_a_request_is_found_by_the_id_that_a_proxy_gave_it(tmp_path: Path) -> None:
    async with in_process(make_app(tmp_path, ReportingEngine())) as http:
        given = "a33c908d-5f0c-4a1e-9d3e-0123456789ab"
        assert await ask(http, **{"x-request-id": given}) == given
        found = (await http.get(f"/v1/engine/explain/{given}")).json()
    assert [job["state"] for job in found["jobs"]] == ["finished"]


async def test_with_replicas_the_choice_is_explained_too(tmp_path: Path) -> None:
    async with in_process(make_app(tmp_path, ReplicatedEngine())) as http:
        request_id = await ask(http)
        (job,) = (await http.get(f"/v1/engine/explain/{request_id}")).json()["jobs"]
    assert job["counts"] == {"prompt_tokens": 20, "cached_tokens": 16}
    first, second = job["replicas"]
    assert first == {
        "replica": "a",
        "wait_s": 1.0,
        "least_wait_s": 0.5,
        "cached_tokens": 64,
        "saved_s": 0.25,
    }
    assert second["replica"] == "b"


async def test_a_caller_sees_no_request_of_another_key(tmp_path: Path) -> None:
    app = make_app(tmp_path, ReportingEngine(), api_key=("one", "two"))
    async with in_process(app) as http:
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        request_id = await ask(http, **mine)
        path = f"/v1/engine/explain/{request_id}"
        assert (await http.get(path, headers=mine)).status_code == 200
        assert (await http.get(path, headers=other)).status_code == 404


@pytest.mark.parametrize(("key", "status"), [("two", 200), ("wrong", 401)])
async def test_no_other_caller_removes_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, status: int
) -> None:
    """Neither by sending its id nor by sending many, with a key of another owner or without."""
    monkeypatch.setattr(http_app, "RecentRequests", partial(RecentRequests, 2))
    app = make_app(tmp_path, ReportingEngine(), api_key=("one", "two"))
    async with in_process(app) as http:
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", key))
        assert await ask(http, **mine, **{"x-request-id": "same"}) == "same"
        for given in ("same", "b", "c", "d"):
            sent = await http.post(
                "/v1/chat/completions",
                json=chat(max_tokens=3),
                headers={**other, "x-request-id": given},
            )
            assert sent.status_code == status
        found = await http.get("/v1/engine/explain/same", headers=mine)
    assert (found.status_code, len(found.json().get("jobs", ()))) == (200, 1)


async def test_what_is_not_known_is_a_404_that_says_so(tmp_path: Path) -> None:
    async with in_process(make_app(tmp_path, ReportingEngine())) as http:
        refused = await http.post("/v1/chat/completions", json={})
        for request_id in ("mine", refused.headers["x-request-id"]):
            unknown = await http.get(f"/v1/engine/explain/{request_id}")
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
            assert "X-Request-Id" in unknown.json()["error"]["message"]


async def test_a_job_without_an_account_says_how_far_it_is(tmp_path: Path) -> None:
    engine = ReportingEngine()
    async with in_process(make_app(tmp_path, engine)) as http:
        request_id = await ask(http)
        (entry,) = engine.journal.call(request_id.removeprefix("req-"))
        states = {}
        for ended_s, error in ((None, ""), (1.0, "engine_down"), (1.0, "")):
            entry.report, entry.ended_s, entry.error = None, ended_s, error
            (job,) = (await http.get(f"/v1/engine/explain/{request_id}")).json()["jobs"]
            states[job["state"]] = job["error"]
            assert (job["arrival_s"], job["seconds"], job["stages"]) == (None, {}, [])
    assert states == {"running": "", "failed": "engine_down", "cancelled": ""}


def test_old_jobs_and_requests_are_forgotten() -> None:
    journal, requests = JobJournal(max_jobs=2), RecentRequests(max_requests=2)
    for call in ("a", "b", "c"):
        journal.open(f"{call}.0", "tiny")
        requests.add("", call, call)
    journal.end("a.0")
    journal.add_report("a.0", REPORT)
    assert [len(journal.call(call)) for call in ("a", "b", "c")] == [0, 1, 1]
    assert [requests.find(call, "") is None for call in ("a", "b", "c")] == [True, False, False]
    assert requests.find("b", "another") is None


def test_each_owner_has_a_list_of_its_own() -> None:
    requests = RecentRequests(max_requests=2)
    for call, owner in (("a", "one"), ("b", "two"), ("c", "two"), ("d", "two")):
        requests.add(owner, f"id-{call}", call)
    assert requests.find("id-a", "one") is not None
    assert [requests.find(f"id-{call}", "two") is None for call in "bcd"] == [True, False, False]


def test_the_latest_request_of_an_id_counts() -> None:
    requests = RecentRequests(max_requests=2)
    for call in ("a", "b", "c"):
        requests.add("", "same", call)
    found = requests.find("same", "")
    assert found is not None
    assert found.call_id == "c"
