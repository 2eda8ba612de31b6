"""Vectors for clients of Ollama, in front of a made-up engine."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.full_app import NUM_DIMENSIONS, VectorEngine, embedding_model
from support.http import in_process
from triptych.core.engine_api.model_changes import KeepModel
from triptych.core.http.app import create_app
from triptych.core.options.config import Config
from triptych.modalities.embedding.api import ollama
from triptych.modalities.embedding.api.ollama import ollama_embeddings_router
from triptych.modalities.embedding.api.replies import numbers
from triptych.modalities.embedding.api.service import EmbeddingService, Floats
from triptych.modalities.llm.api.ollama.dialect import OLLAMA
from triptych.schedulers.admission import Admission


@pytest.fixture
def engine() -> VectorEngine:
    return VectorEngine()


@pytest.fixture
async def client(tmp_path: Path, engine: VectorEngine) -> AsyncIterator[httpx.AsyncClient]:
    config = Config()
    service = EmbeddingService.from_config(config, [embedding_model(tmp_path / "m")], engine)
    app = create_app(config, engine, [ollama_embeddings_router(service)], dialects=[OLLAMA])
    async with in_process(app) as client:
        yield client


async def test_vectors(client: httpx.AsyncClient, engine: VectorEngine) -> None:
    body = {"model": "words:latest", "input": ["w1 w2", "w3"], "keep_alive": "5m"}
    answer = await client.post("/api/embed", json=body)
    assert engine.changes == [KeepModel("words", 300.0)]
    reply = answer.json()
    assert reply["embeddings"] == [[0.5] * NUM_DIMENSIONS] * 2
    assert (reply["model"], reply["prompt_eval_count"]) == ("words:latest", 7)
    assert reply["total_duration"] > reply["load_duration"] >= 0
    body = {"model": "words", "input": "w1", "dimensions": 4}
    (vector,) = (await client.post("/api/embed", json=body)).json()["embeddings"]
    assert len(vector) == 4


async def test_errors_name_ollamas_fields(client: httpx.AsyncClient) -> None:
    body = {"model": "words", "input": "w1", "prompt": "w1", "options": {"num_ctx": 1}}
    for path, left_out in (("/api/embed", "prompt"), ("/api/embeddings", "input")):
        asked = {name: value for name, value in body.items() if name != left_out}
        answer = await client.post(path, json=asked)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("options.num_ctx must be above")
    long = {"model": "words", "input": "w1 " * 100, "truncate": False}
    error = (await client.post("/api/embed", json=long)).json()["error"]
    assert "set truncate to true" in error


async def test_one_vector(client: httpx.AsyncClient, engine: VectorEngine) -> None:
    body = {"model": "words", "prompt": "w1"}
    answer = await client.post("/api/embeddings", json={**body, "keep_alive": 0})
    assert answer.is_success
    reply = (await client.post("/api/embeddings", json=body)).json()
    assert reply == {"embedding": [0.5] * NUM_DIMENSIONS}
    assert engine.unloaded == ["words"]  # after the answer


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [({}, 64), ({"options": {"num_ctx": 9}}, 9), ({"options": {"num_ctx": 8192}}, 64)],
)
async def test_long_texts_are_cut(
    client: httpx.AsyncClient, fields: dict[str, Any], num_tokens: int
) -> None:
    body = {"model": "words", "input": "w1 " * 100, **fields}
    reply = (await client.post("/api/embed", json=body)).json()
    assert reply["prompt_eval_count"] == num_tokens


@pytest.mark.parametrize(
    ("fields", "status", "named"),
    [
        ({"input": "w1 " * 100, "truncate": False}, 400, "102 tokens"),
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": "w1", "dimensions": 99}, 400, "dimensions"),
        ({"input": "w1", "colour": 1}, 400, "colour"),
        ({"input": "w1", "model": "other"}, 404, "other"),
    ],
)
async def test_what_is_refused_is_named(
    client: httpx.AsyncClient, fields: dict[str, Any], status: int, named: str
) -> None:
    reply = await client.post("/api/embed", json={"model": "words", **fields})
    assert reply.status_code == status
    assert named in reply.json()["error"]


async def test_a_vector_per_token_is_refused(tmp_path: Path) -> None:
    engine, config = VectorEngine(), Config()
    models = [embedding_model(tmp_path / "m")]
    admission = Admission(options=config.schedule)
    service = EmbeddingService(engine, models, admission, pools=False)
    app = create_app(config, engine, [ollama_embeddings_router(service)], dialects=[OLLAMA])
    async with in_process(app) as client:
        for path, field in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
            reply = await client.post(path, json={"model": "words", field: "w1"})
            assert reply.status_code == 400
            assert "--no-pool-embeddings" in reply.json()["error"]


async def test_vectors_are_written_on_a_thread(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def watched(vector: Floats) -> Any:
        threads.append(threading.current_thread())
        return numbers(vector)

    monkeypatch.setattr(ollama, "numbers", watched)
    body = {"model": "words", "input": ["w1", "w2"]}
    assert (await client.post("/api/embed", json=body)).status_code == 200
    assert len(threads) == 2
    assert threading.main_thread() not in threads
