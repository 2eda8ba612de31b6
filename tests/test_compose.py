"""What the composition root plugs together, in front of an engine that makes answers up."""

from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.http import FakeEngine, chat, in_process, live, until
from support.image_app import write_image_folder
from support.text_models import write_text_folder
from support.vision_folders import write_vision_folder
from triptych.compose import build_app
from triptych.core.errors import WeightsError
from triptych.core.options.config import Config, ScheduleOptions, ServerOptions
from triptych.modalities.llm.api.text import TextModel

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}

OTHERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/embeddings", {"model": "tiny", "input": "hi"}),
    ("/v1/images/generations", {"model": "pix", "prompt": "a red apple"}),
)


@pytest.mark.parametrize(("path", "body"), OTHERS)
def test_a_key_has_its_share_once_whatever_it_asks_for(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    gate = threading.Event()
    engine = FakeEngine(gate=gate)
    config = Config(
        schedule=ScheduleOptions(max_jobs_per_key=1), server=ServerOptions(api_key=("one", "two"))
    )
    models = (
        write_text_folder(tmp_path / "text", hidden_size=8),
        write_image_folder(tmp_path / "image"),
    )
    app = build_app(config, models, engine)

    async def scenario() -> tuple[httpx.Response, httpx.Response]:
        async with asyncio.timeout(30), in_process(app, authorization="Bearer one") as client:
            first = asyncio.create_task(client.post("/v1/chat/completions", json=chat()))
            await asyncio.to_thread(until, lambda: bool(engine.running))
            refused = await client.post(path, json=body)
            gate.set()
            return await first, refused

    first, refused = asyncio.run(scenario())
    assert first.status_code == 200
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"


def test_a_key_that_fills_the_queue_is_refused_and_the_other_is_answered(tmp_path: Path) -> None:
    engine = FakeEngine(gate=threading.Event())
    config = Config(
        schedule=ScheduleOptions(max_queue_size=7, max_batch_size=1),
        server=ServerOptions(api_key=("one", "two")),
    )
    app = build_app(config, (write_text_folder(tmp_path / "text", hidden_size=8),), engine)
    assert engine.gate is not None
    with live(app) as server, ThreadPoolExecutor(30) as pool:

        def send(key: str) -> Future[httpx.Response]:
            headers = {"authorization": f"Bearer {key}"}
            url = f"{server.url}/v1/chat/completions"
            return pool.submit(httpx.post, url, json=chat(), headers=headers, timeout=60)

        loud = [send("one") for _ in range(20)]
        until(lambda: sum(map(Future.done, loud)) == 14)
        light = send("two")
        until(lambda: len(engine.submitted) == 7)
        engine.gate.set()
        assert light.result().status_code == 200
        refused = [each.result() for each in loud if each.result().status_code != 200]
    assert {reply.status_code for reply in refused} == {429}
    assert {reply.json()["error"]["code"] for reply in refused} == {"rate_limit_exceeded"}
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)


def test_a_damaged_vision_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: Any, **options: Any) -> TextModel:
        raise KeyError("a field")

    model = write_vision_folder(tmp_path / "eyes")
    monkeypatch.setattr(TextModel, "open", read)
    with pytest.raises(WeightsError, match=r"tiny-eyes cannot be read.*KeyError"):
        build_app(Config(server=ServerOptions(num_decode_children=1)), [model], FakeEngine())


async def test_closing_an_app_ends_the_children_that_prepare_images(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))

    def started() -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True)) - before

    model = write_vision_folder(tmp_path / "seeing")
    app = build_app(Config(server=ServerOptions(num_decode_children=1)), [model], FakeEngine())
    until(lambda: bool(started()))
    await app.state.close()
    until(lambda: not started())


async def test_the_page_can_be_switched_off() -> None:
    for is_on, status in ((True, 200), (False, 404)):
        app = build_app(Config(server=ServerOptions(page=is_on)), (), FakeEngine())
        async with in_process(app) as client:
            for path in ("/", "/docs", "/page/icon.svg"):
                reply = await client.get(path, headers=BROWSER)
                assert reply.status_code == status


async def test_a_browser_finds_the_page_where_others_find_a_greeting() -> None:
    app = build_app(Config(), (), FakeEngine())
    async with in_process(app) as client:
        page, greeting = await client.get("/", headers=BROWSER), await client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert greeting.text == "Ollama is running"
    assert page.headers["vary"] == greeting.headers["vary"] == "accept"


async def test_the_conversations_of_chat_models_can_be_embedded(tmp_path: Path) -> None:
    engine = FakeEngine()
    app = build_app(Config(), [write_text_folder(tmp_path)], engine)
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    async with in_process(app) as client:
        counted = await client.post("/tokenize", json={**asked, "add_generation_prompt": False})
        await client.post("/v1/embeddings", json=asked)
    await app.state.close()
    (request,) = engine.submitted.values()
    assert list(request.prompt_ids) == counted.json()["tokens"]
    assert request.sampling.returns_state


async def test_models_are_listed_with_their_sizes(tmp_path: Path) -> None:
    models = [write_text_folder(tmp_path / "text"), write_image_folder(tmp_path / "pix")]
    app = build_app(Config(), models, FakeEngine())
    (tmp_path / "text/model.safetensors").write_bytes(bytes(7))
    (tmp_path / "pix/vae/model.safetensors").write_bytes(bytes(5))
    listed = build_app(Config(), models, FakeEngine())
    async with in_process(app) as before, in_process(listed) as after:
        old = (await before.get("/v1/models")).json()["data"]
        text, image = (await after.get("/v1/models")).json()["data"]
    for each in (app, listed):
        await each.state.close()
    assert all("weight_bytes" not in card for card in old)
    assert (text["weight_bytes"], image["weight_bytes"]) == (7, 5)
    assert "default_size" not in text
    assert re.fullmatch(r"\d+x\d+", image["default_size"])
