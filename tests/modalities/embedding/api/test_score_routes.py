"""`/v1/rerank` and `/v1/score` over a real engine with tiny models."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from support.embedding_models import WORDS, build, save, save_cross_encoder
from support.http import live, refused
from triptych.core.http.app import create_app
from triptych.core.http.models import Task
from triptych.core.options.config import Config, DeviceOptions, ModelOptions
from triptych.core.runtime.devices.device import open_device
from triptych.modalities.embedding.api.routes import embedding_cards, embeddings_router
from triptych.modalities.embedding.api.score_routes import score_router
from triptych.modalities.embedding.api.service import EmbeddingService
from triptych.modalities.embedding.api.text import EmbeddingModel
from triptych.modalities.embedding.engine.loader import open_embedding_loader
from triptych.modalities.embedding.modality import EMBEDDING
from triptych.schedulers.engine import EngineCore
from triptych.schedulers.local import LocalClient

FIRST = ("text_1", "queries", "data_1")
SECOND = ("text_2", "documents", "items", "data_2")
QUERY = "w1 w2"
DOCUMENTS = ["w3 w4 w5", "w1 w2 w3", " ".join(f"w{n}" for n in range(40)), "w9"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    judge, reference = save_cross_encoder(folder / "judge")
    raw, _ = save_cross_encoder(
        folder / "raw",
        sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"},
    )
    vectors = save(folder / "tiny", pooling_mode_mean_tokens=True)
    return {"judge": judge, "raw": raw, "tiny": vectors, "reference": reference}


@pytest.fixture(scope="module")
def client(models: dict[str, Any]) -> Iterator[httpx.Client]:
    config = Config(device=DeviceOptions(device="cpu"), models=ModelOptions())
    device, ledger = open_device(config.device)
    resolved = [
        models["judge"],
        models["tiny"],
        type(models["raw"])(name="raw", reference="raw", folder=models["raw"].folder, digest="r"),
    ]
    loaders = [open_embedding_loader(each, config, device, ledger) for each in resolved]
    engine = LocalClient(EngineCore(loaders, config=config, ledger=ledger))
    opened = [EmbeddingModel.open(each, config.models) for each in resolved]
    service = EmbeddingService.from_config(config, opened, engine)
    routers = [embeddings_router(service), score_router(service)]
    tasks = [Task(*EMBEDDING.task), *(Task(*task) for task in EMBEDDING.more_tasks)]
    app = create_app(config, engine, routers, embedding_cards(service), tasks)
    with live(app) as server, httpx.Client(base_url=server.url, verify=False) as client:
        yield client


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


@torch.inference_mode()
def logit(model: Any, first: str, second: str) -> float:
    one, two = [1, *ids(first), 2], [*ids(second), 2]
    types = [0] * len(one) + [1] * len(two)
    reply = model(input_ids=torch.tensor([one + two]), token_type_ids=torch.tensor([types]))
    score: float = reply.logits.item()
    return score


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def rerank(client: httpx.Client, path: str = "/v1/rerank", **fields: Any) -> httpx.Response:
    body = {"model": "judge", "query": QUERY, "documents": DOCUMENTS, **fields}
    return client.post(path, json=body)


def test_a_cross_encoder_scores_as_transformers_does(
    client: httpx.Client, models: dict[str, Any]
) -> None:
    reply = rerank(client).json()
    wanted = [sigmoid(logit(models["reference"], QUERY, each)) for each in DOCUMENTS]
    scores = {entry["index"]: entry["relevance_score"] for entry in reply["results"]}
    assert [scores[n] for n in range(len(DOCUMENTS))] == pytest.approx(wanted, abs=1e-5)
    order = [entry["index"] for entry in reply["results"]]
    assert order == sorted(range(len(DOCUMENTS)), key=lambda index: -wanted[index])
    num_tokens = sum(len(QUERY.split()) + len(each.split()) + 3 for each in DOCUMENTS)
    assert reply["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert reply["model"] == "judge"
    assert reply["id"].startswith("rerank-")
    for entry in reply["results"]:
        assert entry["document"] == {"text": DOCUMENTS[entry["index"]]}


def test_scores_before_the_sigmoid(client: httpx.Client, models: dict[str, Any]) -> None:
    wanted = pytest.approx(logit(models["reference"], QUERY, "w9"), abs=1e-5)
    for fields in ({"use_activation": False}, {"model": "raw"}):
        (result,) = rerank(client, documents=["w9"], **fields).json()["results"]
        assert result["relevance_score"] == wanted


@pytest.mark.parametrize("path", ["/rerank", "/v1/reranking", "/reranking"])
def test_other_servers_paths_are_the_same_route(client: httpx.Client, path: str) -> None:
    assert rerank(client, path).json()["results"] == rerank(client).json()["results"]


def test_shapes_of_jina_and_cohere(client: httpx.Client) -> None:
    whole = rerank(client).json()
    jina = rerank(
        client,
        "/rerank",
        query={"text": QUERY},
        documents=[{"text": each} for each in DOCUMENTS],
        top_n=2,
    ).json()
    assert jina["results"] == whole["results"][:2]
    cohere = rerank(client, "/v2/rerank", top_n=2, rank_fields=None).json()
    assert [entry.keys() for entry in cohere["results"]] == [{"index", "relevance_score"}] * 2
    shown = rerank(client, "/v2/rerank", top_n=1, return_documents=True).json()
    assert shown["results"] == whole["results"][:1]
    assert len(rerank(client, top_n=100).json()["results"]) == len(DOCUMENTS)
    bare = rerank(client, return_documents=False).json()
    assert all("document" not in entry for entry in bare["results"])


@torch.inference_mode()
def test_an_embedding_model_scores_by_cosine(client: httpx.Client) -> None:
    def vector(text: str) -> Any:
        states = build("bert")(torch.tensor([[1, *ids(text), 2]])).last_hidden_state[0]
        return torch.nn.functional.normalize(states.mean(0), dim=0).numpy()

    reply = client.post(
        "/v1/score", json={"model": "tiny", "text_1": QUERY, "text_2": DOCUMENTS}
    ).json()
    wanted = [float(vector(QUERY) @ vector(each)) for each in DOCUMENTS]
    np.testing.assert_allclose([entry["score"] for entry in reply["data"]], wanted, atol=1e-5)
    assert [entry["index"] for entry in reply["data"]] == [0, 1, 2, 3]
    ranked = rerank(client, model="tiny").json()["results"]
    assert [entry["index"] for entry in ranked] == list(np.argsort(wanted)[::-1])


def test_score_takes_pairs(client: httpx.Client) -> None:
    texts = {"text_1": ["w1", "w2"], "text_2": ["w3", "w4 w5"]}
    pairs = client.post("/score", json={"model": "judge", **texts}).json()
    assert pairs["object"] == "list"
    for n, entry in enumerate(pairs["data"]):
        alone = {"text_1": texts["text_1"][n], "text_2": texts["text_2"][n]}
        (single,) = client.post("/v1/score", json={"model": "judge", **alone}).json()["data"]
        assert entry == {"object": "score", "index": n, "score": pytest.approx(single["score"])}


@pytest.mark.parametrize("names", [*product(FIRST, SECOND)])
def test_score_takes_every_name_of_its_sides(client: httpx.Client, names: tuple[str, str]) -> None:
    def ask(first: str, second: str) -> httpx.Response:
        body = {"model": "judge", first: ["w1", "w2"], second: ["w3", "w4 w5"]}
        return client.post("/score", json=body)

    assert ask(*names).json()["data"] == ask("text_1", "text_2").json()["data"]
    first, second = names
    uneven = client.post("/score", json={first: ["w1", "w2"], second: ["w3"] * 3, "model": "judge"})
    assert refused(uneven)["param"] == first
    long = client.post("/score", json={first: "w1", second: LONG, "model": "judge"})
    assert refused(long)["param"] == second


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text_1": "w1"}, "text_2"),
        ({"queries": "w1"}, "text_2"),
        ({"documents": "w1"}, "text_1"),
        ({"text_1": "w1", "queries": "w1", "documents": "w2"}, "queries"),
        ({"queries": "w1", "documents": "w2", "items": "w2"}, "items"),
    ],
)
def test_each_side_has_one_name(client: httpx.Client, fields: dict[str, str], param: str) -> None:
    reply = client.post("/v1/score", json={"model": "judge", **fields})
    assert refused(reply)["param"] == param


def test_no_cosine_is_beyond_one(client: httpx.Client) -> None:
    texts = [f"w{n % 60} w{7 * n % 60}" for n in range(200)]
    body = {"model": "tiny", "text_1": texts, "text_2": texts}
    scores = [entry["score"] for entry in client.post("/score", json=body).json()["data"]]
    assert max(scores) <= 1.0
    assert min(scores) == pytest.approx(1.0)


@pytest.mark.parametrize("model", ["judge", "tiny"])
def test_the_end_that_is_cut_off_can_be_chosen(client: httpx.Client, model: str) -> None:
    num_kept = 9 if model == "judge" else 18  # of a pair of 20 less three marks, of 20 less two
    query = " ".join(f"w{n}" for n in range(8))
    for side in ("left", "right"):
        cut = rerank(
            client,
            model=model,
            query=query,
            documents=[LONG],
            truncate_prompt_tokens=20,
            truncation_side=side,
        ).json()
        words = LONG.split()
        kept = words[-num_kept:] if side == "left" else words[:num_kept]
        whole = rerank(
            client,
            model=model,
            query=query,
            documents=[" ".join(kept)],
        ).json()
        scores = [each["results"][0]["relevance_score"] for each in (cut, whole)]
        assert scores[0] == pytest.approx(scores[1])


LONG = " ".join(f"w{n % 60}" for n in range(100))


@pytest.mark.parametrize("model", ["judge", "tiny"])
def test_what_is_too_long_is_refused_or_cut_as_asked(client: httpx.Client, model: str) -> None:
    error = refused(rerank(client, model=model, documents=["w1", LONG]))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "documents"
    assert "truncate_prompt_tokens" in error["message"]
    num_kept = 10 if model == "judge" else 8  # the marks count for a text of its own
    cut = rerank(client, model=model, documents=[LONG], max_tokens_per_doc=10).json()
    same = rerank(client, model=model, documents=[" ".join(LONG.split()[:num_kept])]).json()
    assert cut["results"][0]["relevance_score"] == same["results"][0]["relevance_score"]
    assert rerank(client, model=model, documents=[LONG], truncate_prompt_tokens=-1).is_success
    short = rerank(client, model=model, documents=[LONG], truncate_prompt_tokens=20).json()
    assert short["usage"]["total_tokens"] <= 40
    for most in (2, 65):
        error = refused(rerank(client, model=model, truncate_prompt_tokens=most))
        assert error["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": ""}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", ""]}, "documents[1]"),
        ({"documents": ["a"] * 2049}, "documents"),
        ({"documents": [{"text": "a", "title": "b"}]}, "documents[0].title"),
        ({"top_n": -1}, "top_n"),
        ({"rank_fields": ["title"]}, "rank_fields"),
        ({"max_chunks_per_doc": 10}, "max_chunks_per_doc"),
        ({"texts": ["a"]}, "texts"),
        ({"model": "tiny", "use_activation": False}, "use_activation"),
    ],
)
def test_what_is_wrong_is_named(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert refused(rerank(client, **fields))["param"] == param


def test_unequal_numbers_of_texts_are_no_pairs(client: httpx.Client) -> None:
    texts = {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}
    reply = client.post("/v1/score", json={"model": "judge", **texts})
    assert refused(reply)["param"] == "text_1"


def test_a_cross_encoder_has_no_vectors_and_says_where_to_go(client: httpx.Client) -> None:
    error = refused(client.post("/v1/embeddings", json={"model": "judge", "input": "a"}))
    assert error["code"] == "wrong_model"
    assert "/v1/rerank" in error["message"]
    tasks = {card["id"]: card["task"] for card in client.get("/v1/models").json()["data"]}
    assert tasks == {"judge": "rerank", "raw": "rerank", "tiny": "embedding"}
