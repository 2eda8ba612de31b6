"""A model that judges pairs by a prompt: its scores are those of its logits in transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from support.embedding_models import save_decoder
from support.http import live
from triptych.core.http.app import create_app
from triptych.core.options.config import Config, DeviceOptions, ModelOptions
from triptych.core.runtime.devices.device import open_device
from triptych.core.weights.layout import read_json
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.embedding.api.score_routes import score_router
from triptych.modalities.embedding.api.service import EmbeddingService
from triptych.modalities.embedding.api.text import EmbeddingModel
from triptych.modalities.embedding.engine.loader import open_embedding_loader
from triptych.modalities.embedding.kinds import ModelKind, kind_of
from triptych.schedulers.engine import EngineCore
from triptych.schedulers.local import LocalClient

DOCUMENTS = ["w1 w2", "w3", "w1 <|im_start|> w4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 by the name of a reranker, which knows the words of its prompt."""
    made = tmp_path_factory.mktemp("models") / "Qwen3-Reranker-0.6B"
    save_decoder(made, has_modules=False)
    file = made / "tokenizer.json"
    fields = json.loads(file.read_text())
    vocabulary = fields["model"]["vocab"]
    for index, word in enumerate(("yes", "no", "<Query>:", "<Instruct>:", "Judge"), start=10):
        vocabulary[word] = vocabulary.pop(f"w{index - 4}")
    del vocabulary["w58"], vocabulary["w59"]  # the special tokens get their ids
    tokenizer = Tokenizer.from_str(json.dumps(fields))
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer.save(str(file))
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> EmbeddingModel:
    return EmbeddingModel.open(resolved_of(folder), ModelOptions())


def resolved_of(folder: Path) -> ResolvedModel:
    return ResolvedModel(name="judge", reference="x", folder=str(folder), digest="0")


@pytest.fixture(scope="module")
def client(folder: Path, model: EmbeddingModel) -> Iterator[httpx.Client]:
    config = Config(device=DeviceOptions(device="cpu"), models=ModelOptions(dtype="float32"))
    device, ledger = open_device(config.device)
    loader = open_embedding_loader(resolved_of(folder), config, device, ledger)
    engine = LocalClient(EngineCore([loader], config=config, ledger=ledger))
    service = EmbeddingService.from_config(config, [model], engine)
    app = create_app(config, engine, [score_router(service)])
    with live(app) as server, httpx.Client(base_url=server.url) as asked:
        yield asked


def expected(folder: Path, model: EmbeddingModel, instruction: str) -> np.ndarray:
    import transformers

    network = transformers.Qwen3ForCausalLM.from_pretrained(folder).eval()
    scores = []
    for ids in model.encode_judged([("w5", each) for each in DOCUMENTS], instruction):
        with torch.inference_mode():
            logits = network(torch.tensor([ids])).logits[0, -1]
        yes, no = model.judge.answers
        scores.append(float((logits[yes] - logits[no]).sigmoid()))
    return np.array(scores)


@pytest.mark.parametrize("instruction", ["", "w9 w8"])
def test_scores_are_yes_less_no(
    client: httpx.Client, folder: Path, model: EmbeddingModel, instruction: str
) -> None:
    body: dict[str, Any] = {"model": "judge", "text_1": "w5", "text_2": DOCUMENTS}
    for _ in range(2):  # the second time out of the prefix cache
        reply = client.post("/v1/score", json={**body, "instruction": instruction}).json()
        found = [entry["score"] for entry in reply["data"]]
        np.testing.assert_allclose(found, expected(folder, model, instruction), atol=1e-5)
    assert len(set(found)) == 3


def test_users_cannot_write_special_tokens(model: EmbeddingModel) -> None:
    start = model.reader().tokenizer.token_to_id("<|im_start|>")
    *_, last = model.encode_judged([("w5", each) for each in DOCUMENTS], "")
    assert last.count(start) == (*model.judge.before, *model.judge.after).count(start) == 3


def test_what_a_judge_does_not_do_is_refused_by_name(client: httpx.Client) -> None:
    body = {"model": "judge", "query": "w5", "documents": DOCUMENTS}
    refused = client.post("/v1/rerank", json={**body, "truncate_prompt_tokens": 9})
    assert "max_tokens_per_doc" in refused.json()["error"]["message"]
    short = client.post("/v1/rerank", json={**body, "max_tokens_per_doc": 1})
    scores = {entry["index"]: entry["relevance_score"] for entry in short.json()["results"]}
    assert scores[0] == scores[2]


def test_other_models_of_the_family_chat(tmp_path: Path, folder: Path) -> None:
    config = read_json(folder / "config.json")
    assert kind_of(folder, config) is ModelKind.JUDGE
    assert kind_of(tmp_path, config) is ModelKind.DECODER
    assert kind_of(tmp_path, {**config, "is_original_qwen3_reranker": True}) is ModelKind.JUDGE


def test_a_pair_that_is_too_long_is_told_what_shortens_it(client: httpx.Client) -> None:
    body = {"model": "judge", "query": "w5", "documents": ["w1 " * 9999]}
    message = client.post("/v1/rerank", json=body).json()["error"]["message"]
    assert "set max_tokens_per_doc to" in message
    assert client.post("/v1/rerank", json={**body, "max_tokens_per_doc": 9}).is_success
