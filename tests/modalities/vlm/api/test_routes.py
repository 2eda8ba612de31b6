"""Chats with images over the whole app, in front of a made-up engine: answers and faults."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from support.http import ANSWER, FakeEngine, in_process
from support.images import image, saved
from support.text_models import write_text_folder
from support.vision_folders import data_url, shown, write_vision_folder
from triptych.compose import build_app
from triptych.core.http.auth import owners
from triptych.core.options.config import Config, ServerOptions, VisionOptions
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.diffusion.api.links import FILES_ROUTE, ImageLinks, ImageStore

CHAT = "/v1/chat/completions"
PNG = saved(image())
JPEG = saved(image(400, 300), "jpeg")
SERVER = ServerOptions(
    num_decode_children=1, max_request_bytes=4000, api_key=("one-key", "other-key")
)

# One app for all: its decode child takes a second to start.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[ResolvedModel, ...]:
    folder = tmp_path_factory.mktemp("models")
    text = write_text_folder(folder / "text", model_type="llama")
    return text, write_vision_folder(folder / "eyes")


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def links() -> ImageLinks:
    return ImageLinks(ImageStore(max_bytes=10_000, ttl_s=60.0))


@pytest.fixture(scope="module")
def app(
    models: tuple[ResolvedModel, ...], engine: FakeEngine, links: ImageLinks
) -> Iterator[FastAPI]:
    config = Config(server=SERVER, vision=VisionOptions(max_images=2))
    before = set(psutil.Process().children())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("triptych.modalities.diffusion.api.routes.image_links", lambda config: links)
        yield build_app(config, models, engine)
    for child in set(psutil.Process().children()) - before:  # they live as long as their server
        child.kill()
        child.wait()


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with in_process(app) as client:
        client.headers["authorization"] = "Bearer one-key"
        yield client


async def test_an_image_goes_to_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    reply = (await client.post(CHAT, json=shown(data_url(PNG), data_url(JPEG, "jpeg")))).json()
    assert reply["choices"][0]["message"]["content"] == ANSWER[:9]
    details = reply["usage"]["prompt_tokens_details"]
    assert (details["image_tokens"], details["cached_images"]) == (32, 0)
    request = list(engine.submitted.values())[-1]
    assert reply["usage"]["prompt_tokens"] == len(request.prompt_ids)
    for found in request.contents:
        (run,) = found.span.runs
        assert min(request.prompt_ids[run[0] : sum(run)]) >= 2**62
        assert found.inputs["pixel_values"].shape == (1, 3, 28, 28)


async def test_links_of_this_server_are_open_to_their_owner(
    client: httpx.AsyncClient, engine: FakeEngine, links: ImageLinks
) -> None:
    owner, other = owners(SERVER)
    name = f"{links.store.add(PNG, 'png', owner)}.png"
    for base in ("http://t", "https://public.test/below"):
        reply = await client.post(CHAT, json=shown(f"{base}{FILES_ROUTE}/{name}"))
        assert reply.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 16
    theirs = f"{links.store.add(PNG, 'png', other)}.png"
    for url in (f"http://t{FILES_ROUTE}/{theirs}", f"http://t{FILES_ROUTE}/{name[:-3]}webp"):
        reply = await client.post(CHAT, json=shown(url))
        assert reply.status_code == 400
        assert "send it as a data URL" in reply.json()["error"]["message"]
    reply = await client.post(CHAT, json=shown(f"https://elsewhere.test{FILES_ROUTE}/{theirs}"))
    assert "--media-domains" in reply.json()["error"]["message"]


async def test_models_say_whether_they_see(client: httpx.AsyncClient) -> None:
    cards = (await client.get("/v1/models")).json()["data"]
    found = {card["id"]: card.get("input_modalities") for card in cards}
    assert found == {"tiny": None, "tiny-eyes": ["text", "image"]}


async def test_a_model_of_text_names_those_that_see(client: httpx.AsyncClient) -> None:
    reply = await client.post(CHAT, json=shown(data_url(PNG), model="tiny"))
    assert reply.status_code == 400
    assert "tiny reads text alone" in reply.json()["error"]["message"]
    assert "tiny-eyes" in reply.json()["error"]["message"]


async def test_text_alone_has_no_image_tokens(client: httpx.AsyncClient) -> None:
    reply = (await client.post(CHAT, json=shown())).json()
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


@pytest.mark.parametrize("kind", ["file", "input_image"])
async def test_other_parts_are_refused_by_name(client: httpx.AsyncClient, kind: str) -> None:
    body = shown()
    body["messages"][0]["content"].append({"type": kind, kind: {"file_id": "file-1"}})
    reply = await client.post(CHAT, json=body)
    assert reply.status_code == 400
    assert f"not '{kind}'" in reply.json()["error"]["message"]


async def test_images_are_the_users(client: httpx.AsyncClient) -> None:
    body = shown(data_url(PNG))
    body["messages"][0]["role"] = "assistant"
    reply = await client.post(CHAT, json=body)
    assert reply.status_code == 400
    assert "a user's message" in reply.json()["error"]["message"]


async def test_bounds(client: httpx.AsyncClient) -> None:
    reply = await client.post(CHAT, json=shown(*[data_url(PNG)] * 3))
    assert reply.status_code == 400
    assert "at most 2 images" in reply.json()["error"]["message"]
    assert (await client.post(CHAT, json=shown(text="x" * 5000))).status_code == 413
    large = saved(image(300, 200), compress_level=0)
    assert len(large) > SERVER.max_request_bytes
    assert (await client.post(CHAT, json=shown(data_url(large)))).status_code == 200


async def test_tenants_share_neither_pages_nor_images(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for key in ("one-key", "one-key", "other-key"):
        headers = {"authorization": f"Bearer {key}"}
        await client.post(CHAT, json=shown(data_url(PNG)), headers=headers)
    first, again, other = list(engine.submitted.values())[-3:]
    assert first.prompt_ids == again.prompt_ids != other.prompt_ids
    assert first.contents == again.contents
    assert first.contents[0].span.digest != other.contents[0].span.digest
    assert first.contents[0].inputs == other.contents[0].inputs
    assert first.tenant == again.tenant != other.tenant


@pytest.mark.parametrize(
    ("fields", "status"), [({}, 200), ({"temperature": -7}, 400), ({"model": "nobody"}, 404)]
)
async def test_uploads_are_let_go_of_even_if_the_server_keeps_the_request(
    app: FastAPI, fields: dict[str, Any], status: int
) -> None:
    """As uvicorn does, in a cycle that only the garbage collector opens."""
    scopes: list[Scope] = []

    async def keeping(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await app(scope, receive, send)

    async with in_process(keeping, authorization="Bearer one-key") as client:
        body = shown(data_url(saved(image(500, 500)))) | fields
        assert (await client.post(CHAT, json=body)).status_code == status
    (scope,) = scopes
    assert scope["state"]["data_urls"]
    assert app.state.upload_budget.num_bytes == 0


async def test_tokenize_counts_what_text_there_is(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "hi <image>"}]
    reply = await client.post("/tokenize", json={"model": "tiny-eyes", "messages": messages})
    assert reply.json()["count"] == len(reply.json()["tokens"])


async def test_an_image_may_be_a_file_that_was_uploaded(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    def kept(file_id: str, **more: str) -> dict[str, Any]:
        body = shown()
        part = {"type": "image_file", "image_file": {"file_id": file_id, **more}}
        body["messages"][0]["content"].append(part)
        return body

    files = {"file": ("image.png", PNG)}
    made = await client.post("/v1/files", data={"purpose": "vision"}, files=files)
    file_id = made.json()["id"]
    reply = await client.post(CHAT, json=kept(file_id, detail="low"))
    assert reply.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 16
    by_id = list(engine.submitted.values())[-1]
    await client.post(CHAT, json=shown(data_url(PNG)))
    by_url = list(engine.submitted.values())[-1]
    assert by_id.contents[0].span.digest == by_url.contents[0].span.digest
    theirs = await client.post(
        CHAT, json=kept(file_id), headers={"authorization": "Bearer other-key"}
    )
    assert theirs.status_code == 404
    assert theirs.json()["error"]["param"] == "file_id"
    assert (await client.post("/tokenize", json=kept(file_id))).status_code == 400


@pytest.mark.parametrize("fields", [{"return_token_ids": True}, {"prompt_logprobs": 1}])
async def test_positions_of_images_have_no_ids_or_probabilities(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    reply = await client.post(CHAT, json=shown(data_url(PNG)) | fields)
    assert reply.json()["error"]["code"] == "unsupported_option"
    assert reply.json()["error"]["param"] == next(iter(fields))


async def test_an_answer_to_an_image_may_be_begun(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = shown(data_url(PNG)) | {"continue_final_message": True, "echo": True}
    body["messages"].append({"role": "assistant", "content": "It is a"})
    reply = (await client.post(CHAT, json=body)).json()
    assert reply["choices"][0]["message"]["content"].startswith("It is a" + ANSWER[:5])
    request = list(engine.submitted.values())[-1]
    words = [one for one in request.prompt_ids if one < 2**62]
    tokens = {"model": "tiny-eyes", "tokens": words}
    prompt = (await client.post("/detokenize", json=tokens)).json()["prompt"]
    assert prompt.endswith("It is a")
