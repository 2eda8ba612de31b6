"""Models of another kind are distinguished from unknown ones; names may hold slashes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from support.full_app import MODELS, open_full_app
from support.http import READY, FakeEngine, chat, in_process
from support.images import image, saved
from support.voices_app import recording
from triptych.compose import further_names
from triptych.core.engine_api.reports import ModelStatus
from triptych.core.http.app import create_app
from triptych.core.http.models import ModelCard
from triptych.core.options.config import Config, ModelOptions
from triptych.core.weights.resolve import ResolvedModel

ROUTES = {
    "chat": "/v1/chat/completions",
    "embedding": "/v1/embeddings",
    "speech": "/v1/audio/speech",
    "transcription": "/v1/audio/transcriptions",
    "image": "/v1/images/generations",
}
WAV = {"file": ("a.wav", recording())}
IMAGE = {"image": ("a.png", saved(image(64, 64)))}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    return open_full_app(tmp_path_factory.mktemp("models")).app


async def ask(client: httpx.AsyncClient, model: str) -> list[tuple[str, httpx.Response]]:
    """Ask every route that takes a model for `model`."""
    name = {"model": model}
    bodies: dict[str, dict[str, Any]] = {
        "chat /v1/chat/completions": {"json": {**chat(max_tokens=1), **name}},
        "chat /v1/completions": {"json": {"prompt": "a", "max_tokens": 1, **name}},
        "chat /tokenize": {"json": {"prompt": "a", **name}},
        "chat /detokenize": {"json": {"tokens": [5], **name}},
        "embedding /v1/embeddings": {"json": {"input": "w1", **name}},
        "speech /v1/audio/speech": {"json": {"input": "Hello.", **name}},
        "transcription /v1/audio/transcriptions": {"data": name, "files": WAV},
        "transcription /v1/audio/translations": {"data": name, "files": WAV},
        "image /v1/images/generations": {"json": {"prompt": "a", "size": "64x64", **name}},
        "image /v1/images/edits": {"data": {"prompt": "a", **name}, "files": IMAGE},
        "image /v1/images/variations": {"data": name, "files": IMAGE},
    }
    found = []
    for route, body in bodies.items():
        kind, path = route.split()
        found.append((kind, await client.post(path, **body)))
    reply = await client.get("/v1/audio/voices", params=name)
    return [*found, ("speech", reply)]


@pytest.mark.parametrize("kind", MODELS)
async def test_wrong_kind_of_model_names_the_right_route(app: FastAPI, kind: str) -> None:
    async with in_process(app) as client:
        for wanted, reply in await ask(client, MODELS[kind]):
            error = reply.json().get("error") if "json" in reply.headers["content-type"] else None
            if wanted == kind:  # translations need a model that knows more than English
                assert error is None or error["code"] != "wrong_model"
                continue
            assert (reply.status_code, error["code"]) == (400, "wrong_model")
            assert error["param"] == "model"
            assert error["message"].startswith(f"{MODELS[kind]} ")
            assert f"post to {ROUTES[kind]}." in error["message"]
            assert MODELS[wanted] in error["message"]


async def test_a_model_that_is_not_here_is_not_found(app: FastAPI) -> None:
    async with in_process(app) as client:
        for wanted, reply in await ask(client, "no\x1b[1mne"):
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (404, "model_not_found")
            assert "'no\\x1b[1mne'" in error["message"]
            assert MODELS[wanted] in error["message"]


_SAID = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES_BY_KIND: list[tuple[str, str, dict[str, Any]]] = [
    ("chat", "/v1/chat/completions", {"json": {**_SAID, "max_tokens": 1}}),
    ("chat", "/v1/completions", {"json": {"prompt": "a", "max_tokens": 1}}),
    ("chat", "/v1/responses", {"json": {"input": "hi"}}),
    ("chat", "/v1/responses/input_tokens", {"json": {"input": "hi"}}),
    ("chat", "/v1/messages", {"json": {**_SAID, "max_tokens": 1}}),
    ("chat", "/v1/messages/count_tokens", {"json": _SAID}),
    ("chat", "/api/chat", {"json": {**_SAID, "stream": False}}),
    ("chat", "/api/generate", {"json": {"prompt": "a", "stream": False}}),
    ("chat", "/tokenize", {"json": {"prompt": "a"}}),
    ("embedding", "/v1/embeddings", {"json": {"input": "w1"}}),
    ("embedding", "/v1/score", {"json": {"text_1": "w1", "text_2": "w2"}}),
    ("embedding", "/v1/rerank", {"json": {"query": "w1", "documents": ["w2"]}}),
    ("speech", "/v1/audio/speech", {"json": {"input": "Hello."}}),
    ("transcription", "/v1/audio/transcriptions", {"files": WAV}),
    ("image", "/v1/images/generations", {"json": {"prompt": "a", "size": "64x64"}}),
]
_IMPLIED = [entry for entry in ROUTES_BY_KIND if entry[0] != "image" and entry[1] != "/tokenize"]
"""The others take the first of several."""


@pytest.mark.parametrize(("kind", "path", "body"), ROUTES_BY_KIND)
async def test_a_request_without_a_model_means_the_only_one(
    app: FastAPI, kind: str, path: str, body: dict[str, Any]
) -> None:
    async with in_process(app) as client:
        reply = await client.post(path, **body)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("absent", ["", None])
@pytest.mark.parametrize(("kind", "path", "body"), _IMPLIED)
async def test_no_name_is_no_model(
    app: FastAPI, kind: str, path: str, body: dict[str, Any], absent: str | None
) -> None:
    fields = {"model": absent or ""}
    named = {**body, "json": {**body["json"], "model": absent}} if "json" in body else body
    async with in_process(app) as client:
        reply = await client.post(path, **named, **({} if "json" in body else {"data": fields}))
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(("kind", "path", "body"), _IMPLIED)
@pytest.mark.parametrize("names", [["one", "two"], []])
async def test_a_request_without_a_model_says_which_there_are(
    app: FastAPI, kind: str, path: str, body: dict[str, Any], names: list[str]
) -> None:
    before = app.state.models_by_task
    app.state.models_by_task = {kind: names} if names else {"other": ["x"]}
    try:
        async with in_process(app) as client:
            reply = await client.post(path, **body)
    finally:
        app.state.models_by_task = before
    assert reply.status_code == (400 if names else 404), reply.text
    assert all(name in reply.text for name in (*names, "model"))


def test_another_name_of_a_model_is_no_second_one() -> None:
    cards = [ModelCard(id=name, task="chat") for name in ("own", "gpt-4o", "gpt-5")]
    names = ["gpt-4o=own", "gpt-5=own"]
    config = Config(models=ModelOptions(model=("own",), served_model_name=tuple(names)))
    assert create_app(config, FakeEngine(), [], cards).state.models_by_task == {"chat": ["own"]}


async def test_speech_models_are_listed_for_front_ends(app: FastAPI) -> None:
    async with in_process(app) as client:
        listed = (await client.get("/v1/audio/models")).json()
    assert [card["id"] for card in listed["models"]] == ["hum"]
    assert listed["data"] == listed["models"]


async def test_names_with_slashes_are_shown() -> None:
    cards = [ModelCard(id="org/model-1", task="chat")]
    app = create_app(Config(), FakeEngine(), [], cards)
    async with in_process(app) as client:
        for path in ("org/model-1", "org%2Fmodel-1"):
            reply = await client.get(f"/v1/models/{path}")
            assert reply.json()["id"] == "org/model-1"
        assert (await client.get("/v1/models/org")).json()["error"]["code"] == "model_not_found"


async def test_a_reduced_context_is_listed_for_the_model_and_its_names() -> None:
    cards = [ModelCard(id=name, task="chat", max_model_len=99) for name in ("own", "alias", "b")]
    status = ModelStatus(model="own", state="ready", reduced_context=20)
    config = Config(models=ModelOptions(model=("own", "b"), served_model_name=("alias=own",)))
    engine = FakeEngine(state=replace(READY, models=(status,)))
    async with in_process(create_app(config, engine, [], cards)) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        shown = (await client.get("/v1/models/alias")).json()
    assert [card["max_model_len"] for card in listed] == [20, 20, 99]
    assert shown["max_model_len"] == 20


async def test_a_slash_behind_the_list_is_no_model(app: FastAPI) -> None:
    async with in_process(app) as client:
        assert (await client.get("/v1/models/")).status_code == 404


THEIRS = {
    "chat": "gpt-4o-mini",
    "embedding": "text-embedding-3-small",
    "speech": "tts-1",
    "transcription": "whisper-1",
    "image": "gpt-image-1",
}


@pytest.fixture(scope="module", params=["openai", "any"])
def accepting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    folder = tmp_path_factory.mktemp("models")
    return open_full_app(folder, accept_model_names=request.param).app


@pytest.mark.parametrize(("kind", "name"), THEIRS.items())
async def test_openais_names_mean_the_model_of_the_routes_task(
    app: FastAPI, accepting: FastAPI, kind: str, name: str
) -> None:
    is_any = accepting.state.accepted_names == "any"
    async with in_process(app) as client:
        replies = [reply for wanted, reply in await ask(client, name) if wanted == kind]
        assert {reply.status_code for reply in replies} == {404}, "off by default"
    async with in_process(accepting) as client:
        for wanted, reply in await ask(client, name):
            if reply.request.method == "POST":
                is_taken = is_any or wanted == kind
                assert (reply.status_code != 404) == is_taken, (wanted, reply.text)
        card = await client.get(f"/v1/models/{name}")
        listed = await client.get("/v1/models")
    assert card.json()["id"] == MODELS[kind]
    assert name not in listed.text


async def test_any_name_means_the_only_model(accepting: FastAPI) -> None:
    body = chat() | {"model": "whatever"}
    is_any = accepting.state.accepted_names == "any"
    by_task = accepting.state.models_by_task
    async with in_process(accepting) as client:
        reply = await client.post("/v1/chat/completions", json=body)
        assert reply.status_code == (200 if is_any else 404)
        assert (await client.get("/v1/models/whatever")).status_code == 404, "of no task"
        accepting.state.models_by_task = {"chat": ["tiny", "other"]}
        reply = await client.post("/v1/chat/completions", json=body)
        accepting.state.models_by_task = by_task
        assert reply.status_code == 404, "two could be meant"


async def test_a_further_name_means_its_model(tmp_path: Path) -> None:
    app = open_full_app(tmp_path).app
    app.state.further_names = {"embedded": "tiny"}
    async with in_process(app) as client:
        reply = await client.post("/v1/chat/completions", json=chat() | {"model": "embedded"})
        card = await client.get("/v1/models/embedded")
    assert (reply.status_code, card.json()["id"]) == (200, "tiny")


@pytest.mark.parametrize(("kind", "path", "body"), ROUTES_BY_KIND[:5])
async def test_a_name_of_ollamas_lists_means_its_model(
    app: FastAPI, kind: str, path: str, body: dict[str, Any]
) -> None:
    """Open WebUI sends them to the paths of OpenAI and Anthropic, too."""
    async with in_process(app) as client:
        tagged = {**body["json"], "model": f"{MODELS[kind]}:latest"}
        reply = await client.post(path, json=tagged)
        card = await client.get(f"/v1/models/{MODELS[kind]}:latest")
        unknown = await client.post(path, json={**tagged, "model": f"{MODELS[kind]}:7b"})
    assert (reply.status_code, card.json()["id"]) == (200, MODELS[kind])
    assert unknown.status_code == 404


@pytest.mark.parametrize(
    ("references", "names"),
    [
        ({"smollm2-135m-instruct": "embedded"}, {"embedded": "smollm2-135m-instruct"}),
        ({"small": "small=embedded"}, {"embedded": "small"}),
        ({"tiny": "./tiny"}, {}),
    ],
)
def test_the_embedded_model_keeps_the_name_that_was_asked_for(
    references: dict[str, str], names: dict[str, str]
) -> None:
    models = [
        ResolvedModel(name=name, reference=reference, folder="", digest="")
        for name, reference in references.items()
    ]
    assert further_names(models) == names
