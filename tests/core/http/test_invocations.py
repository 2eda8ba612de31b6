"""`/invocations`: a request goes to the route that its body is for."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.full_app import MODELS, FullApp, open_full_app
from support.http import in_process, refused
from triptych.core.http.invocations import route_of
from triptych.core.http.models import Task

SAID = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def full_app(tmp_path_factory: pytest.TempPathFactory) -> FullApp:
    return open_full_app(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("body", "route"),
    [
        ({"messages": SAID, "model": MODELS["chat"]}, "/v1/chat/completions"),
        ({"messages": SAID}, "/v1/chat/completions"),
        ({"prompt": "hi", "model": MODELS["chat"]}, "/v1/completions"),
        ({"prompt": "hi", "model": MODELS["image"], "size": "64x64"}, "/v1/images/generations"),
        ({"input": "w1"}, "/v1/embeddings"),
        ({"input": "Hello.", "model": MODELS["speech"]}, "/v1/audio/speech"),
        ({"query": "w1", "documents": ["w2"]}, "/v1/rerank"),
        ({"query": "w1", "texts": ["w2"]}, "/v1/rerank"),
        ({"queries": "w1", "documents": ["w2"]}, "/v1/score"),
        ({"text_1": "w1", "text_2": ["w2"]}, "/v1/score"),
    ],
)
async def test_a_body_is_answered_by_its_route(
    full_app: FullApp, body: dict[str, Any], route: str
) -> None:
    async with in_process(full_app.app) as client:
        reply = await client.post("/invocations", json=body)
        direct = await client.post(route, json=body)
        metrics = (await client.get("/metrics")).text
    assert reply.status_code == direct.status_code == 200, reply.text
    assert reply.headers["content-type"] == direct.headers["content-type"]
    if reply.headers["content-type"] == "application/json":
        assert _shape(reply.json()) == _shape(direct.json())
    assert 'route="/invocations"' not in metrics


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shape(part) for name, part in value.items()}
    return [_shape(part) for part in value] if isinstance(value, list) else type(value)


CHAT = Task("chat", "chats", "/v1/chat/completions")
SPEECH = Task("speech", "speaks", "/v1/audio/speech")


@pytest.mark.parametrize(
    ("tasks", "body", "route"),
    [
        ({"hum": SPEECH}, {"input": "Hi."}, "/v1/audio/speech"),
        ({"hum": SPEECH, "drum": SPEECH}, {"input": "Hi."}, "/v1/audio/speech"),
        ({"hum": SPEECH, "tiny": CHAT}, {"input": "Hi."}, "/v1/embeddings"),
        ({"hum": SPEECH}, {"input": "Hi.", "model": "other"}, "/v1/embeddings"),
        ({"hum": SPEECH}, {"messages": SAID}, "/v1/chat/completions"),
        ({"tiny": CHAT}, {"prompt": "Hi."}, "/v1/completions"),
        ({}, {"input": "Hi."}, "/v1/embeddings"),
    ],
)
def test_without_a_model_the_kind_of_all_models_is_meant(
    tasks: dict[str, Task], body: dict[str, Any], route: str
) -> None:
    assert route_of(body, tasks) == route


async def test_answers_are_streamed(full_app: FullApp) -> None:
    async with in_process(full_app.app) as client:
        reply = await client.post("/invocations", json={"messages": SAID, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("body", [{}, [], "hi", {"model": "tiny"}, {"messages": None}])
async def test_what_no_route_takes_is_refused(full_app: FullApp, body: Any) -> None:
    async with in_process(full_app.app) as client:
        error = refused(await client.post("/invocations", json=body))
    assert "messages, prompt, input" in error["message"]


async def test_the_routes_rules_hold(full_app: FullApp) -> None:
    async with in_process(full_app.app) as client:
        asked: httpx.Response = await client.post("/invocations", json={"messages": SAID, "x": 1})
        assert refused(asked)["param"] == "x"
        refused(await client.post("/invocations", content=b"{"))
        typed = {"content-type": "text/plain"}
        other = await client.post("/invocations", content=b'{"prompt": "a"}', headers=typed)
        assert other.status_code == 415
        wrong = await client.post("/invocations", json={"input": "w1", "model": MODELS["chat"]})
        assert refused(wrong)["code"] in ("wrong_model", "model_not_found")
        assert (await client.get("/invocations")).headers["allow"] == "POST"
