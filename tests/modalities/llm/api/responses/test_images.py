"""Images of answers and conversations: how long they are kept, and what they hold of memory."""

from __future__ import annotations

import base64
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from support.http import FakeEngine, in_process, refused
from support.images import image, saved
from support.responses_app import SeeingEncoder, ask_for, seeing_service
from triptych.core.http.app import create_app
from triptych.core.http.files.routes import files_router
from triptych.core.http.files.user_files import UserFiles
from triptych.core.options.config import Config, ServerOptions, StoreOptions
from triptych.core.store.documents import DocumentTable
from triptych.core.store.store import DocumentStore
from triptych.modalities.llm.api.responses import lists
from triptych.modalities.llm.api.responses.answering import Answering
from triptych.modalities.llm.api.responses.conversations import conversations_router
from triptych.modalities.llm.api.responses.images import HeldImages
from triptych.modalities.llm.api.responses.routes import responses_router


async def post(client: httpx.AsyncClient, path: str = "/v1/responses", **body: Any) -> Any:
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def message_with(*files: bytes) -> dict[str, Any]:
    urls = (f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files)
    content = [{"type": "input_image", "image_url": url} for url in urls]
    return {"role": "user", "content": content}


@asynccontextmanager
async def seeing(
    folder: Path, encoder: SeeingEncoder, engine: FakeEngine | None = None
) -> AsyncIterator[FastAPI]:
    engine, store = engine or FakeEngine(), DocumentStore.from_options(StoreOptions())
    assert store is not None
    service = seeing_service(folder, engine, encoder)
    answering = Answering.open(service, store, ServerOptions())
    user_files = UserFiles(store)
    routers = [
        responses_router(answering),
        conversations_router(answering),
        files_router(user_files),
    ]
    app = create_app(Config(), engine, routers)
    app.state.user_files, app.state.store = user_files, store
    yield app
    await store.close()


async def test_images_of_results_are_seen_and_kept(tmp_path: Path) -> None:
    encoder, file = SeeingEncoder(), saved(image(width=20))
    call = {"type": "function_call", "call_id": "c1", "name": "view", "arguments": "{}"}
    shown = message_with(file)["content"]
    result = {"type": "function_call_output", "call_id": "c1", "output": shown}
    async with seeing(tmp_path, encoder) as app, in_process(app) as client:
        first = await post(client, **ask_for([call, result]))
        await post(client, **ask_for("what?", previous_response_id=first["id"]))
        path = f"/v1/responses/{first['id']}/input_items"
        asked = {"include": "message.input_image.image_url", "order": "asc"}
        for params, url in (({"order": "asc"}, None), (asked, shown[0]["image_url"])):
            listed = (await client.get(path, params=params)).json()["data"]
            assert listed[1]["output"][0]["image_url"] == url
    assert encoder.seen == [[file], [file]]


async def test_images_are_kept_with_their_conversation(tmp_path: Path) -> None:
    encoder, files = SeeingEncoder(), [saved(image(width=n)) for n in (20, 40)]
    messages = [message_with(file) for file in files]
    async with seeing(tmp_path, encoder) as app, in_process(app) as client:
        first = await post(client, **ask_for(messages[:1]))
        await post(client, **ask_for(messages[1:], previous_response_id=first["id"]))
        conversation = (await post(client, "/v1/conversations", items=messages[:1]))["id"]
        await post(client, **ask_for(messages[1:], conversation=conversation))
        await post(client, **ask_for("what?", conversation=conversation))
        await client.delete(f"/v1/conversations/{conversation}")
        body = ask_for("what?", conversation=conversation)
        refused(await client.post("/v1/responses", json=body), 404)
    assert encoder.seen == [files[:1], *[files] * 3]


async def test_images_that_were_uploaded(tmp_path: Path) -> None:
    encoder, file = SeeingEncoder(), saved(image())
    async with seeing(tmp_path, encoder) as app, in_process(app) as client:
        form = {"data": {"purpose": "vision"}, "files": {"file": ("a.png", file)}}
        kept = (await client.post("/v1/files", **form)).json()["id"]
        message = {"role": "user", "content": [{"type": "input_image", "file_id": kept}]}
        first = await post(client, **ask_for([message]))
        await post(client, **ask_for("and?", previous_response_id=first["id"]))
        listed = await client.get(f"/v1/responses/{first['id']}/input_items")
        message["content"][0]["file_id"] = "file-none"
        refused(await client.post("/v1/responses", json=ask_for([message])), 404)
    assert encoder.seen == [[file]] * 2
    assert listed.json()["data"][0]["content"] == [{"type": "input_image", "file_id": kept}]


async def test_an_image_goes_with_its_item(tmp_path: Path) -> None:
    def num_bytes(table: DocumentTable) -> int:
        return table.num_bytes

    file = saved(image(width=200))
    async with seeing(tmp_path, SeeingEncoder()) as app, in_process(app) as client:
        conversation = (await post(client, "/v1/conversations"))["id"]
        empty = await app.state.store.call(num_bytes)
        path = f"/v1/conversations/{conversation}/items"
        (item,) = (await post(client, path, items=[message_with(file)]))["data"]
        assert await app.state.store.call(num_bytes) > empty + len(file)
        await client.delete(f"{path}/{item['id']}")
        assert await app.state.store.call(num_bytes) == empty


async def test_images_count_until_they_are_kept(tmp_path: Path) -> None:
    engine, file = FakeEngine(is_endless=True, step_s=0.005), saved(image(width=200))
    async with seeing(tmp_path, SeeingEncoder(), engine) as app, in_process(app) as client:
        conversation = (await post(client, "/v1/conversations"))["id"]
        budget, given = app.state.upload_budget, message_with(file)
        for place, num_held in ((None, 0), (conversation, len(file))):
            begun = await post(client, **ask_for([given], background=True, conversation=place))
            assert budget.num_bytes == num_held
            held = [one for one in gc.get_objects() if type(one) is HeldImages]
            assert sum(len(each.data) for one in held for each in one.values()) == num_held
            await client.post(f"/v1/responses/{begun['id']}/cancel")
            assert budget.num_bytes == 0


async def test_images_that_go_before_count(tmp_path: Path) -> None:
    encoder, file = SeeingEncoder(), saved(image(width=200))
    async with seeing(tmp_path, encoder) as app, in_process(app) as client:
        conversation = (await post(client, "/v1/conversations", items=[message_with(file)]))["id"]
        app.state.upload_budget.max_bytes = len(file) // 2
        body = ask_for(conversation=conversation)
        assert refused(await client.post("/v1/responses", json=body), 503)["code"] == "overloaded"
    assert not encoder.seen


async def test_a_page_of_images_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [saved(image(width=200 + n)) for n in range(4)]
    monkeypatch.setattr(lists, "MAX_PAGE_BYTES", 3 * len(files[0]))
    async with seeing(tmp_path, SeeingEncoder()) as app, in_process(app) as client:
        items = [message_with(file) for file in files]
        conversation = (await post(client, "/v1/conversations", items=items))["id"]
        path, seen, after = f"/v1/conversations/{conversation}/items", [], ""
        while after is not None:
            query = f"?order=asc&after={after}&include[]=message.input_image.image_url"
            page = (await client.get(path + query)).json()
            assert len(page["data"]) < len(files)
            seen += [each["content"][0] for each in page["data"]]
            after = page["last_id"] if page["has_more"] else None
        plain = (await client.get(path)).json()
    assert seen == [item["content"][0] for item in items]
    assert [each["content"][0]["image_url"] for each in plain["data"]] == [None] * 4


async def test_no_client_names_an_image_s_place(tmp_path: Path) -> None:
    part = {"type": "input_image", "image_url": "kept-picture:pic_1;image/png"}
    item = {"role": "user", "content": [part]}
    async with seeing(tmp_path, SeeingEncoder()) as app, in_process(app) as client:
        conversation = (await post(client, "/v1/conversations"))["id"]
        for path in ("/v1/conversations", f"/v1/conversations/{conversation}/items"):
            error = refused(await client.post(path, json={"items": [item]}))
            assert "not the URL of an image" in error["message"]
