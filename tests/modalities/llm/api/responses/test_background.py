"""Answers in the background: they can be followed from any place, and each of them ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.http import ANSWER, FakeEngine, documents, in_process, refused
from support.responses_app import ask_for, check_order, responses_app
from triptych.core.errors import RequestTimeout, StoreFull, Unavailable
from triptych.core.http.disconnect import InFlight
from triptych.core.store.store import DocumentStore
from triptych.modalities.llm.api.responses.archive import Archive
from triptych.modalities.llm.api.responses.background import BackgroundRun, BackgroundRuns
from triptych.modalities.llm.api.responses.builder import ResponseBuilder
from triptych.modalities.llm.api.responses.events import ResponseEvent
from triptych.modalities.llm.api.responses.protocol import ResponseRequest
from triptych.modalities.llm.api.responses.replies import (
    ResponseFailure,
    ResponseReply,
    first_fields,
)


class Run:
    """A run that says nothing, and what is kept of it."""

    def __init__(self, keeping: asyncio.Event | None = None) -> None:
        body = ResponseRequest.model_validate(ask_for(background=True))
        fields = first_fields(body, "resp_1", {}, is_kept=True)
        self._builder = ResponseBuilder(fields, has_logprobs=False)
        self._keeping = keeping
        self.kept: list[ResponseReply] = []
        self.run = BackgroundRun(self._builder, self._made(), self._begin, self._keep)

    async def _made(self) -> AsyncGenerator[ResponseEvent, None]:
        for event in self._builder.start():
            yield event
        await asyncio.sleep(0)
        self._builder.response = self._builder.response.model_copy(update={"status": "completed"})

    async def _begin(self) -> None:
        self.kept.append(self._builder.response)

    async def _keep(self, events: Sequence[ResponseEvent]) -> None:
        if self._keeping is not None:
            await self._keeping.wait()
        self.kept.append(self._builder.response)


async def test_an_end_is_shown_once_it_is_kept() -> None:
    keeping = asyncio.Event()
    made = Run(keeping)
    made.run.start(lambda: None)
    await made.run.wait_begun()
    for _ in range(20):
        await asyncio.sleep(0)
    assert made.run.response.status == "in_progress"
    keeping.set()
    await made.run.wait_ended()
    assert made.run.response.status == made.kept[-1].status == "completed"


async def test_one_that_is_cut_at_once_ends() -> None:
    made, runs, in_flight = Run(), BackgroundRuns(), InFlight()
    runs.start("ann", made.run, in_flight)
    await runs.cancel("ann", "resp_1")
    assert [response.status for response in made.kept] == ["queued", "cancelled"]
    assert runs.find("ann", "resp_1") is None
    assert not len(in_flight)


async def post(client: httpx.AsyncClient, **body: Any) -> Any:
    reply = await client.post("/v1/responses", json=ask_for(**body))
    assert reply.status_code == 200, reply.text
    return reply.json()


async def ended(client: httpx.AsyncClient, name: str) -> Any:
    async with asyncio.timeout(30):
        while True:
            shown = (await client.get(f"/v1/responses/{name}")).json()
            if shown["status"] not in ("queued", "in_progress"):
                return shown
            await asyncio.sleep(0.01)


@pytest.mark.timeout(30)
async def test_followed_from_beyond_its_events(tmp_path: Path) -> None:
    engine = FakeEngine(is_endless=True, step_s=0.005)
    with responses_app(tmp_path, engine) as app:
        async with in_process(app) as client:
            name = (await post(client, background=True, stream=False))["id"]
            path = f"/v1/responses/{name}"
            following = [
                asyncio.create_task(client.get(path, params={"stream": True, **place}))
                for place in ({"starting_after": 100_000}, {"starting_after": 1}, {})
            ]
            await asyncio.sleep(0.05)
            assert (await client.post(f"{path}/cancel")).json()["status"] == "cancelled"
            beyond, later, whole = [documents((await each).text) for each in following]
    assert beyond == []
    assert later == whole[2:]
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))


@pytest.mark.parametrize(("fields", "deadline_s"), [({}, 600.0), ({"background": True}, None)])
async def test_nobody_waits_for_one(
    tmp_path: Path, fields: dict[str, Any], deadline_s: float | None
) -> None:
    engine = FakeEngine()
    with responses_app(tmp_path, engine, request_timeout_s=600.0) as app:
        async with in_process(app) as client:
            name = (await post(client, **fields))["id"]
            assert (await ended(client, name))["status"] == "completed"
    assert engine.deadlines_s == [deadline_s]


async def test_followed_later(tmp_path: Path) -> None:
    with responses_app(tmp_path, FakeEngine()) as app:
        async with in_process(app) as client:
            reply = await client.post("/v1/responses", json=ask_for(background=True, stream=True))
            events = documents(reply.text)
            path = f"/v1/responses/{events[0]['response']['id']}"
            await ended(client, events[0]["response"]["id"])
            again = await client.get(path, params={"stream": True})
            rest = await client.get(path, params={"stream": True, "starting_after": 4})
    check_order(events)
    assert again.text == reply.text
    assert documents(rest.text) == events[5:]


async def test_an_end_that_does_not_fit_says_so(tmp_path: Path) -> None:
    store = DocumentStore("memory", max_bytes=4000, ttl_s=60.0)
    with responses_app(tmp_path, FakeEngine(answer="x" * 3000), store=store) as app:
        async with in_process(app) as client:
            name = (await post(client, background=True))["id"]
            shown = await ended(client, name)
            assert app.state.in_flight.quiet.is_set()
            kept = (await client.get(f"/v1/responses/{name}")).json()
    assert shown == kept
    assert kept["status"] == "failed"
    assert kept["output"] == []
    assert kept["error"]["code"] == "server_error"
    assert kept["error"]["type"] == "store_full"


@pytest.mark.parametrize("error", [Unavailable("The disk is gone."), KeyError("ours")])
async def test_an_end_that_cannot_be_kept_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(Archive, "complete", fail)
    with responses_app(tmp_path, FakeEngine()) as app:
        async with in_process(app) as client:
            name = (await post(client, background=True))["id"]
            assert (await ended(client, name))["status"] == "failed"
            refused(await client.post(f"/v1/responses/{name}/cancel"))
            assert len(app.state.in_flight) == 0
            assert (await client.delete(f"/v1/responses/{name}")).status_code == 200
            refused(await client.get(f"/v1/responses/{name}"), 404)


async def test_its_end_can_be_built_on_at_once(tmp_path: Path) -> None:
    with responses_app(tmp_path, FakeEngine()) as app:
        async with in_process(app) as client:
            for _ in range(3):
                name = (await post(client, background=True))["id"]
                shown = await ended(client, name)
                assert shown["output"][0]["content"][0]["text"] == ANSWER
                await post(client, previous_response_id=name)


def test_what_is_no_fault_of_the_caller() -> None:
    for error in (StoreFull("full"), RequestTimeout("late")):
        assert ResponseFailure.of(error).code == "server_error"
