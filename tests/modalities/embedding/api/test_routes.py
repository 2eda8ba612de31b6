"""`/v1/embeddings` over a real engine with a tiny encoder, asked by the `openai` package."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from support.embedding_models import build, save, save_decoder, write
from support.http import live
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.http.app import create_app
from triptych.core.options.config import Config, DeviceOptions, ModelOptions
from triptych.core.runtime.devices.device import open_device
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.embedding.api.routes import embedding_cards, embeddings_router
from triptych.modalities.embedding.api.service import EmbeddingService
from triptych.modalities.embedding.api.text import EmbeddingModel
from triptych.modalities.embedding.engine.loader import open_embedding_loader
from triptych.modalities.modality import EncodeChat
from triptych.schedulers.engine import EngineCore
from triptych.schedulers.local import LocalClient


def serve(
    resolved: ResolvedModel, encode: EncodeChat | None = None, **models: Any
) -> Iterator[str]:
    """The base URL of a server of one model, whose conversations `encode` encodes."""
    config = Config(device=DeviceOptions(device="cpu"), models=ModelOptions(**models))
    device, ledger = open_device(config.device)
    loader = open_embedding_loader(resolved, config, device, ledger)
    client = LocalClient(EngineCore([loader], config=config, ledger=ledger))
    service = EmbeddingService.from_config(
        config, [EmbeddingModel.open(resolved, config.models)], client
    )
    router = embeddings_router(service, lambda: encode)
    app = create_app(config, client, [router], embedding_cards(service))
    with live(app) as server:
        yield f"{server.url}/v1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoder")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    resolved = save(folder, pooling_mode_mean_tokens=True)
    prompts = {"prompts": {"query": "w9 w8 "}}
    write(folder / "config_sentence_transformers.json", prompts)
    yield from serve(resolved)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as connection:
        yield connection


@torch.inference_mode()
def expected(words: str, num_dimensions: int = 32) -> np.ndarray:
    ids = [1, *(4 + int(word[1:]) for word in words.split()), 2]
    pooled = build("bert")(torch.tensor([ids])).last_hidden_state[0].mean(0)
    shortened = torch.nn.functional.normalize(pooled, dim=0)[:num_dimensions]
    return torch.nn.functional.normalize(shortened, dim=0).numpy()


def test_texts_come_back_in_their_order_and_equal_transformers(client: openai.OpenAI) -> None:
    texts = [" ".join(f"w{(7 * i + j) % 60}" for j in range(1 + i % 40)) for i in range(300)]
    reply = client.embeddings.create(model="tiny", input=texts)  # base64 underneath
    assert [entry.index for entry in reply.data] == list(range(300))
    assert reply.usage.prompt_tokens == sum(len(text.split()) + 2 for text in texts)
    for text, entry in list(zip(texts, reply.data, strict=True))[::17]:
        np.testing.assert_allclose(entry.embedding, expected(text), atol=1e-5)


def test_numbers_and_base64_are_the_same(client: openai.OpenAI) -> None:
    numbers = client.embeddings.create(model="tiny", input="w1 w2", encoding_format="float")
    raw = client.embeddings.with_raw_response.create(
        model="tiny", input="w1 w2", encoding_format="base64"
    )
    data = base64.b64decode(raw.http_response.json()["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(data, "<f4"), np.float32(numbers.data[0].embedding))


def test_fewer_dimensions_are_a_vector_of_their_own(client: openai.OpenAI) -> None:
    reply = client.embeddings.create(model="tiny", input=["w3 w4"], dimensions=8)
    np.testing.assert_allclose(reply.data[0].embedding, expected("w3 w4", 8), atol=1e-5)


def test_token_ids_are_taken_as_they_are(client: openai.OpenAI) -> None:
    one = client.embeddings.create(model="tiny", input=[1, 9, 2])
    several = client.embeddings.create(model="tiny", input=[[1, 9, 2], [1, 10, 2]])
    np.testing.assert_allclose(one.data[0].embedding, expected("w5"), atol=1e-5)
    np.testing.assert_allclose(several.data[1].embedding, expected("w6"), atol=1e-5)


def test_forms_of_input_can_be_mixed(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "w7 "}, {"type": "text", "text": "w8"}]
    mixed: Any = ["w5", [1, 10, 2], {"content": parts}]
    for given, words in ((mixed, ["w5", "w6", "w7 w8"]), (mixed[2], ["w7 w8"])):
        reply = client.embeddings.create(model="tiny", input=given)
        assert len(reply.data) == len(words)
        for entry, text in zip(reply.data, words, strict=True):
            np.testing.assert_allclose(entry.embedding, expected(text), atol=1e-5)


def test_an_instruction_of_the_model_comes_before_the_text(client: openai.OpenAI) -> None:
    reply = client.embeddings.create(model="tiny", input="w1", extra_body={"prompt_name": "query"})
    np.testing.assert_allclose(reply.data[0].embedding, expected("w9 w8 w1"), atol=1e-5)


def test_long_texts_are_cut_only_where_asked(client: openai.OpenAI) -> None:
    text = "w1 " * 100
    cut = client.embeddings.create(
        model="tiny", input=text, extra_body={"truncate_prompt_tokens": -1}
    )
    assert cut.usage.prompt_tokens == 64
    whole = expected("w1 " * 62)  # and the marks around it: a cut text keeps them
    np.testing.assert_allclose(cut.data[0].embedding, whole, atol=1e-5)
    whole = expected(" ".join(f"w{n % 60}" for n in range(38, 100)))
    end = client.embeddings.create(
        model="tiny",
        input=" ".join(f"w{n % 60}" for n in range(100)),
        extra_body={"truncate_prompt_tokens": -1, "truncation_side": "left"},
    )
    np.testing.assert_allclose(end.data[0].embedding, whole, atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="102 tokens; tiny takes 1 to 64"):
        client.embeddings.create(model="tiny", input=text)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [["w1"]]}, "input"),
        ({"input": [1, 64]}, "Token id 64 is not below 64"),
        ({"input": "w1", "dimensions": 33}, "dimensions is 33; tiny has 32"),
        ({"input": "w1", "dimensions": 0}, "dimensions"),
        ({"input": "w1", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "w1", "prompt_name": "poem"}, "its prompts are: query"),
        ({"input": [1, 2], "prompt_name": "query"}, "not for token ids"),
        ({"input": "w1", "truncate_prompt_tokens": 65}, "the model's limit of 64"),
        ({"input": "w1", "truncate_prompt_tokens": 2}, "above 2"),
        ({"input": "w1", "surprise": 1}, "surprise"),
        ({}, "either input or messages"),
        ({"input": "w1", "messages": [{"role": "user", "content": "w1"}]}, "either input or"),
        ({"messages": [{"role": "user", "content": "w1"}]}, "tiny has no chat template"),
        ({"input": "w1", "add_generation_prompt": True}, "add_generation_prompt is for messages"),
        ({"input": {"content": []}}, "content"),
        (
            {"input": {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}},
            "Only texts can be embedded",
        ),
        ({"input": ["w1", [1, 2]], "prompt_name": "query"}, "not for token ids"),
        ({"input": "w1", "truncation_side": "middle"}, "truncation_side"),
        ({"input": ["w1"] * 2049}, "input"),
    ],
)
def test_bad_requests_are_refused_by_name(
    url: str, fields: dict[str, object], complaint: str
) -> None:
    reply = httpx.post(f"{url}/embeddings", json={"model": "tiny", **fields})
    assert reply.status_code == 400
    assert complaint in reply.text


def test_a_model_that_is_not_there_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="Embedding models: tiny"):
        client.embeddings.create(model="other", input="w1")


def test_model_card_has_task_and_length(client: openai.OpenAI) -> None:
    card = client.models.retrieve("tiny")
    assert card.model_extra == {"task": "embedding", "max_model_len": 64}


def test_without_pooling_every_token_has_a_vector(tmp_path: Path) -> None:
    resolved = save(tmp_path, pooling_mode_mean_tokens=True)
    for url in serve(resolved, pool_embeddings=False):
        body = {"model": "tiny", "input": ["w1 w2", "w3"]}
        data = httpx.post(f"{url}/embeddings", json=body).json()["data"]
        assert [np.shape(entry["embedding"]) for entry in data] == [(4, 32), (3, 32)]
        short = httpx.post(f"{url}/embeddings", json={**body, "dimensions": 8})
        assert short.status_code == 400
        assert "--no-pool-embeddings" in short.text


@pytest.mark.parametrize(
    ("has_modules", "architecture"), [(False, "Qwen3ForCausalLM"), (True, "Qwen3Model")]
)
def test_a_decoder_gives_the_state_of_its_last_token(
    has_modules: bool, architecture: str, tmp_path: Path
) -> None:
    resolved, model = save_decoder(tmp_path, has_modules=has_modules, architecture=architecture)
    start = " ".join(f"w{i}" for i in range(40))
    texts = ["w1 w2", start, f"{start} w7", "w3"]

    def vector(words: str) -> np.ndarray:
        ids = torch.tensor([[1, *(4 + int(word[1:]) for word in words.split()), 2]])
        with torch.inference_mode():
            state = model(ids).last_hidden_state[0, -1]
        return torch.nn.functional.normalize(state, dim=0).numpy()

    for url in serve(resolved, dtype="float32"):
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as connection:
            for _ in range(2):  # the second time out of the prefix cache
                reply = connection.embeddings.create(model="tiny", input=texts)
                for text, entry in zip(texts, reply.data, strict=True):
                    np.testing.assert_allclose(entry.embedding, vector(text), atol=1e-5)
            with pytest.raises(openai.BadRequestError, match="takes 1 to 63"):
                connection.embeddings.create(model="tiny", input="w1 " * 62)


def test_a_decoder_that_averages_runs_as_its_class(tmp_path: Path) -> None:
    resolved, model = save_decoder(tmp_path, has_modules=True)
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    with torch.inference_mode():
        state = model(torch.tensor([[1, 5, 6, 2]])).last_hidden_state[0].mean(0)
    wanted = torch.nn.functional.normalize(state, dim=0).numpy()
    for url in serve(resolved, dtype="float32"):
        body = {"model": "tiny", "input": "w1 w2"}
        (entry,) = httpx.post(f"{url}/embeddings", json=body).json()["data"]
        np.testing.assert_allclose(entry["embedding"], wanted, atol=1e-5)


def test_a_conversation_has_the_vector_of_its_tokens(tmp_path: Path) -> None:
    resolved, _ = save_decoder(tmp_path, has_modules=False)
    asked: list[tuple[str, Any, dict[str, Any]]] = []

    async def encode(model: str, messages: Any, **options: Any) -> TokenRequest:
        asked.append((model, messages, options))
        return TokenRequest(prompt_ids=(1, 9, 10, 2))

    body = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}
    for url in serve(resolved, encode, dtype="float32"):
        replies = [
            httpx.post(f"{url}/embeddings", json=each).json()
            for each in (body, {"input": [1, 9, 10, 2]})
        ]
        bad = httpx.post(f"{url}/embeddings", json={**body, "truncate_prompt_tokens": 3})
        assert bad.json()["error"]["param"] == "messages"
    assert replies[0] == replies[1]
    ((model, messages, options),) = asked
    assert (model, messages) == ("tiny", [{"role": "user", "content": "hi"}])
    assert options == {"add_generation_prompt": True}
