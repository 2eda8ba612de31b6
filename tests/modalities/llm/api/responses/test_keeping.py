"""What is kept of answers: over restarts, drains and disconnects, and where nothing is."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.http import (
    ANSWER,
    FakeEngine,
    documents,
    in_process,
    live,
    refused,
    until,
)
from support.responses_app import ask_for, check_order, responses_app
from support.text_models import byte_tokenizer
from triptych.core.errors import Draining
from triptych.core.store.store import DocumentStore
from triptych.modalities.llm.api.responses import archive, history
from triptych.modalities.llm.api.responses.archive import Archive, KeptRequest
from triptych.modalities.llm.api.responses.items import MessageItem
from triptych.modalities.llm.api.responses.protocol import ResponseRequest
from triptych.modalities.llm.api.responses.replies import UNFINISHED, ResponseReply, first_fields


def opened(place: str, *, max_bytes: int = 2**20) -> DocumentStore:
    return DocumentStore(place, max_bytes=max_bytes, ttl_s=60.0)


async def post(client: httpx.AsyncClient, path: str = "/v1/responses", **body: Any) -> Any:
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_a_restart_loses_nothing(tmp_path: Path) -> None:
    engine, path = FakeEngine(), str(tmp_path / "kept.db")
    with responses_app(tmp_path / "one", engine, store=opened(path)) as app:
        async with in_process(app) as client:
            first = await post(client, **ask_for(metadata={"a": "b"}))
            conversation = await post(client, "/v1/conversations", metadata={"c": "d"})
            await post(client, **ask_for("x", conversation=conversation["id"]))
    with responses_app(tmp_path / "two", engine, store=opened(path)) as app:
        async with in_process(app) as client:
            assert (await client.get(f"/v1/responses/{first['id']}")).json() == first
            second = await post(client, **ask_for("more", previous_response_id=first["id"]))
            items = await client.get(f"/v1/conversations/{conversation['id']}/items")
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] + len(ANSWER)
    assert len(items.json()["data"]) == 2


async def test_what_was_being_made_at_a_crash_has_failed(tmp_path: Path) -> None:
    body = ResponseRequest.model_validate(ask_for(background=True))
    begun = ResponseReply(status="queued", **first_fields(body, "resp_1", {}, is_kept=True))
    given = KeptRequest([MessageItem(role="user", content="hi")], {})
    path = str(tmp_path / "kept.db")
    store = opened(path)
    await Archive(store, max_bytes=1000).begin("", begun, given)
    await store.close()
    with responses_app(tmp_path / "model", FakeEngine(), store=opened(path)) as app:
        async with in_process(app) as client:
            failed = (await client.get("/v1/responses/resp_1")).json()
            items = (await client.get("/v1/responses/resp_1/input_items")).json()
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "server_error"
    assert items["data"][0]["content"][0]["text"] == "hi"


async def streamed(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    reply = await client.post("/v1/responses", json=ask_for(stream=True, **fields))
    return documents(reply.text)


async def test_a_drain_ends_answers_with_a_typed_event(tmp_path: Path) -> None:
    engine, path = FakeEngine(is_endless=True, step_s=0.005), str(tmp_path / "kept.db")
    with responses_app(tmp_path / "one", engine, store=opened(path)) as app:
        async with in_process(app) as client:
            begun = await post(client, **ask_for(background=True))
            followed = asyncio.create_task(streamed(client, background=True))
            foreground = asyncio.create_task(streamed(client))
            await asyncio.to_thread(until, lambda: len(engine.submitted) == 3)
            await asyncio.to_thread(until, lambda: engine.num_steps > 100)  # of all of them
            await app.state.in_flight.drain(0.05)
            *_, error = await foreground
            background = await followed
    assert error["type"] == "error"
    assert error["code"] == Draining.code
    check_order(background)
    assert background[-1]["type"] == "response.failed"
    assert background[-1]["response"]["error"]["type"] == Draining.code
    with responses_app(tmp_path / "two", engine, store=opened(path)) as app:
        async with in_process(app) as client:
            failed = (await client.get(f"/v1/responses/{begun['id']}")).json()
    assert failed["status"] == "failed"
    assert failed["error"]["type"] == Draining.code
    assert not engine.running


async def test_a_drain_waits_for_answers_in_the_background(tmp_path: Path) -> None:
    with responses_app(tmp_path, FakeEngine(step_s=0.005)) as app:
        async with in_process(app) as client:
            followed = asyncio.create_task(streamed(client, background=True))
            await asyncio.sleep(0.02)
            await app.state.in_flight.drain(30.0)
            assert (await followed)[-1]["type"] == "response.completed"


def test_a_client_that_leaves_ends_its_answer_alone(tmp_path: Path) -> None:
    engine = FakeEngine(is_endless=True, step_s=0.005)
    with (
        responses_app(tmp_path, engine) as app,
        live(app) as server,
        httpx.Client(base_url=server.url, timeout=30, verify=False) as client,
    ):
        names = []
        for fields in ({}, {"background": True}):
            body = ask_for(stream=True, **fields)
            with client.stream("POST", "/v1/responses", json=body) as reply:
                first = next(line for line in reply.iter_lines() if line[:5] == "data:")
            names.append(json.loads(first.removeprefix("data:"))["response"]["id"])
        until(lambda: bool(engine.cancelled))
        foreground, background = names
        refused(client.get(f"/v1/responses/{foreground}"), 404)
        assert client.get(f"/v1/responses/{background}").json()["status"] in UNFINISHED
        cancelled = client.post(f"/v1/responses/{background}/cancel").json()
        assert cancelled["status"] == "cancelled"


def test_a_stream_begins_before_the_model_says_anything(tmp_path: Path) -> None:
    engine = FakeEngine(gate=threading.Event())
    with (
        responses_app(tmp_path, engine) as app,
        live(app) as server,
        httpx.Client(base_url=server.url, timeout=30, verify=False) as client,
        client.stream("POST", "/v1/responses", json=ask_for(stream=True)) as reply,
    ):
        lines = (line for line in reply.iter_lines() if line.startswith("data:"))
        begun = [next(lines), next(lines)]
        assert not engine.num_steps
        engine.gate.set()
        events = [json.loads(line.removeprefix("data:")) for line in (*begun, *lines)]
    check_order(events)


async def test_where_nothing_is_kept(tmp_path: Path) -> None:
    engine = FakeEngine()
    with responses_app(tmp_path, engine, is_off=True) as app:
        async with in_process(app) as client:
            for store in (None, True, False):
                reply = await post(client, **ask_for(store=store))
                assert reply["status"] == "completed"
                assert reply["store"] is False
            check_order(await streamed(client))
            for fields in (
                {"background": True},
                {"previous_response_id": reply["id"]},
                {"conversation": "conv_1"},
                {"input": [{"type": "item_reference", "id": "msg_1"}]},
            ):
                error = refused(await client.post("/v1/responses", json=ask_for(**fields)))
                assert "--store off" in error["message"]
            refused(await client.get(f"/v1/responses/{reply['id']}"))
            refused(await client.post("/v1/conversations", json={}))


async def test_what_is_not_to_be_kept_is_not(tmp_path: Path) -> None:
    with responses_app(tmp_path, FakeEngine()) as app:
        async with in_process(app) as client:
            reply = await post(client, **ask_for(store=False))
            refused(await client.get(f"/v1/responses/{reply['id']}"), 404)
    assert reply["store"] is False


async def test_the_oldest_answers_give_way(tmp_path: Path) -> None:
    store = opened("memory", max_bytes=12_000)
    with responses_app(tmp_path, FakeEngine(), store=store) as app:
        async with in_process(app) as client:
            names = [(await post(client, **ask_for()))["id"] for _ in range(8)]
            found = [(await client.get(f"/v1/responses/{n}")).status_code for n in names]
    assert found == sorted(found, reverse=True)
    assert set(found) == {404, 200}


async def test_an_answer_that_does_not_fit_is_given_all_the_same(tmp_path: Path) -> None:
    with responses_app(tmp_path, FakeEngine(), store=opened("memory", max_bytes=3000)) as app:
        async with in_process(app) as client:
            reply = await post(client, **ask_for("long" * 500))
            assert reply["output"][0]["content"][0]["text"] == ANSWER
            assert reply["store"] is False
            refused(await client.get(f"/v1/responses/{reply['id']}"), 404)
            body = ask_for("long" * 500, background=True)
            error = refused(await client.post("/v1/responses", json=body), 413)
            assert error["code"] == "store_full"


async def test_what_goes_before_is_bounded(tmp_path: Path) -> None:
    with responses_app(tmp_path, FakeEngine(), max_request_bytes=4000) as app:
        async with in_process(app) as client:
            conversation = (await post(client, "/v1/conversations"))["id"]
            item = {"role": "user", "content": "x" * 1500}
            for _ in range(3):
                await post(client, f"/v1/conversations/{conversation}/items", items=[item])
            body = ask_for(conversation=conversation)
            refused(await client.post("/v1/responses", json=body), 413)


async def test_items_that_are_referred_to_are_bounded(tmp_path: Path) -> None:
    with responses_app(tmp_path, FakeEngine(answer="y" * 300), max_request_bytes=2500) as app:
        async with in_process(app) as client:
            first = await post(client, **ask_for())
            reference = {"type": "item_reference", "id": first["output"][0]["id"]}
            await post(client, **ask_for([reference, {**reference, "type": None}]))
            refused(await client.post("/v1/responses", json=ask_for([reference] * 6)), 413)
            body = ask_for([reference] * 2, previous_response_id=first["id"])
            await post(client, **body)
            body = ask_for([reference] * 5, previous_response_id=first["id"])
            refused(await client.post("/v1/responses", json=body), 413)


async def test_a_chain_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_BATCH", 2)
    monkeypatch.setattr(history, "MAX_MESSAGES", 10)
    engine = FakeEngine(answer="ok")
    with responses_app(tmp_path, engine) as app:
        async with in_process(app) as client:
            names = [None]
            for number in range(6):
                body = ask_for(f"<{number}>", previous_response_id=names[-1])
                names.append((await post(client, **body))["id"])
            body = ask_for("more", previous_response_id=names[-1])
            refused(await client.post("/v1/responses", json=body), 413)
            await client.delete(f"/v1/responses/{names[1]}")
            body = ask_for("more", previous_response_id=names[3])
            refused(await client.post("/v1/responses", json=body), 404)
    *_, request = engine.submitted.values()
    prompt = byte_tokenizer().decode(list(request.prompt_ids))
    places = [prompt.index(f"<{number}>") for number in range(6)]
    assert places == sorted(places)


async def test_a_page_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_PAGE_BYTES", 1500)
    items = [{"role": "user", "content": "x" * 400} for _ in range(5)]
    with responses_app(tmp_path, FakeEngine()) as app:
        async with in_process(app) as client:
            name = (await post(client, **ask_for(items)))["id"]
            path, num_items, num_pages, after = f"/v1/responses/{name}/input_items", 0, 0, ""
            while after is not None:
                page = (await client.get(path, params={"after": after})).json()
                num_items, num_pages = num_items + len(page["data"]), num_pages + 1
                after = page["last_id"] if page["has_more"] else None
    assert num_items == 5
    assert num_pages == 3


async def test_an_item_that_comes_twice_gets_an_id_of_its_own(tmp_path: Path) -> None:
    item = {"type": "message", "id": "msg_1", "role": "user", "content": "a"}
    with responses_app(tmp_path, FakeEngine()) as app:
        async with in_process(app) as client:
            reply = await post(client, **ask_for([item, item]))
            await post(client, **ask_for([item]))
            listed = await client.get(f"/v1/responses/{reply['id']}/input_items")
    first, second = (each["id"] for each in listed.json()["data"])
    assert second == "msg_1"
    assert first.startswith("msg_")
    assert first != second
