"""Images through the APIs of Anthropic and Ollama, in front of a made-up engine."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI

from support.http import FakeEngine, in_process
from support.images import image, saved
from support.vision_folders import write_vision_folder
from triptych.compose import build_app
from triptych.core.options.config import Config, ServerOptions

MODEL = "tiny-eyes"
PNG = saved(image(400, 300))
PNG_TEXT = base64.b64encode(PNG).decode()
SMALL = base64.b64encode(saved(image(28, 28))).decode()

# One app for all: its decode child takes a second to start.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(answer="ok")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, engine: FakeEngine) -> Iterator[FastAPI]:
    before = set(psutil.Process().children())
    eyes = write_vision_folder(tmp_path_factory.mktemp("models") / "eyes")
    server = ServerOptions(num_decode_children=1, max_request_bytes=1400)
    yield build_app(Config(server=server), (eyes,), engine)
    for child in set(psutil.Process().children()) - before:  # they live as long as their server
        child.kill()
        child.wait()


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with in_process(app) as client:
        yield client


def image_part(data: str = PNG_TEXT, **source: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data, **source}
    return {"type": "image", "source": source}


def message(*blocks: dict[str, Any]) -> dict[str, Any]:
    turn = {"role": "user", "content": [*blocks, {"type": "text", "text": "What?"}]}
    return {"model": MODEL, "max_tokens": 5, "messages": [turn]}


def num_images(engine: FakeEngine) -> int:
    return len(list(engine.submitted.values())[-1].contents)


async def test_images_of_a_message(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert len(PNG_TEXT) > 1400, "it is taken out before the JSON is read"
    result = {
        "type": "tool_result",
        "tool_use_id": "a",
        "content": [image_part(), image_part(SMALL)],
    }
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    body = message(result, image_part())
    earlier = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [call]}]
    body["messages"] = earlier + body["messages"]
    reply = await client.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    assert num_images(engine) == 3
    del body["max_tokens"]
    counted = (await client.post("/v1/messages/count_tokens", json=body)).json()
    usage = reply.json()["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.parametrize("is_listed_first", [False, True])
async def test_images_of_ollama(
    client: httpx.AsyncClient, engine: FakeEngine, is_listed_first: bool
) -> None:
    images = [SMALL, PNG_TEXT, PNG_TEXT] if is_listed_first else [PNG_TEXT, SMALL, PNG_TEXT]
    asked = {"role": "user", "content": "What?", "images": images}
    chat = {"model": MODEL, "messages": [asked], "stream": False}
    reply = await client.post("/api/chat", json=chat)
    assert reply.status_code == 200, reply.text
    assert num_images(engine) == 3
    generate = {"model": MODEL, "prompt": "What?", "images": [PNG_TEXT], "stream": False}
    assert (await client.post("/api/generate", json=generate)).status_code == 200
    assert num_images(engine) == 1


async def test_what_is_no_image(client: httpx.AsyncClient) -> None:
    for block, status in (
        (image_part("AAAA"), 415),
        (image_part("A" * 2001), 400),
        ({"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}, 400),
    ):
        reply = await client.post("/v1/messages", json=message(block))
        assert (reply.status_code, reply.json()["type"]) == (status, "error"), reply.text
    text = {"model": MODEL, "prompt": "What?", "images": ["cat.png"]}
    reply = await client.post("/api/generate", json=text)
    assert (reply.status_code, list(reply.json())) == (400, ["error"])


async def test_abilities_are_listed(client: httpx.AsyncClient) -> None:
    shown = (await client.post("/api/show", json={"model": f"{MODEL}:latest"})).json()
    assert "vision" in shown["capabilities"]
