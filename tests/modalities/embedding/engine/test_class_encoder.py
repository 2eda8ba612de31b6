"""Encoders that run as transformers' class: its states and scores, from a whole loader."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from support.embedding_models import SIZES, WORDS, save_tokenizer, write, write_modules
from triptych.core.errors import WeightsError
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, DeviceOptions
from triptych.core.runtime.devices.device import Device
from triptych.core.weights.layout import read_json
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.embedding.engine.loader import open_embedding_loader
from triptych.modalities.embedding.kinds import (
    CLASS_ENCODERS,
    ModelKind,
    is_embedding_model,
    kind_of,
)
from triptych.modalities.embedding.wire import EmbedRequest
from triptych.schedulers.engine import EngineCore
from triptych.schedulers.local import LocalClient

TEXTS = ((5, 6, 7, 2), (9,) * 20, (11, 12, 13, 2), (8, 2))
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_GEMMA = {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 8}
_GEMMA_LAYERS = ["sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 1e4}


def gemma() -> Any:
    """EmbeddingGemma: tokens see each other, in most layers within a window."""
    return transformers.Gemma3TextModel(
        transformers.Gemma3TextConfig(
            **SIZES, **_GEMMA, use_bidirectional_attention=True, layer_types=_GEMMA_LAYERS
        )
    )


MODELS: dict[str, Any] = {
    "nomic_bert": lambda: transformers.NomicBertModel(transformers.NomicBertConfig(**SIZES)),
    "jina_embeddings_v3": lambda: transformers.JinaEmbeddingsV3Model(
        transformers.JinaEmbeddingsV3Config(**SIZES)
    ),
    "gte": lambda: transformers.GteModel(transformers.GteConfig(**SIZES)),
    "deberta-v2": lambda: transformers.DebertaV2Model(
        transformers.DebertaV2Config(**SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"])
    ),
    "t5": lambda: transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=len(WORDS), n_positions=64, **_T5)
    ),
    "embedding_gemma": gemma,
}
SCORERS: dict[str, Any] = {
    "deberta-v2": lambda: transformers.DebertaV2ForSequenceClassification(
        transformers.DebertaV2Config(**SIZES, num_labels=1, id2label={0: "x"})
    ),
    "qwen3": lambda: transformers.Qwen3ForSequenceClassification(
        transformers.Qwen3Config(
            **SIZES,
            head_dim=8,
            num_key_value_heads=2,
            num_labels=1,
            id2label={0: "x"},
            pad_token_id=0,
        )
    ),
}


def save(model: Any, folder: Path, *kinds: str) -> ResolvedModel:
    torch.manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:
                value.normal_(std=0.3)
    model.eval().save_pretrained(folder)
    save_tokenizer(folder)
    if kinds:
        write_modules(folder, ["Transformer", "Pooling", *kinds])
        write(folder / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    return ResolvedModel(name="tiny", reference="x", folder=str(folder), digest="0")


def run(resolved: ResolvedModel, request: EmbedRequest) -> list[np.ndarray]:
    async def ask() -> list[np.ndarray]:
        config, ledger = Config(device=DeviceOptions(device="cpu")), Ledger(2**30)
        loader = open_embedding_loader(resolved, config, Device.open("cpu"), ledger)
        client = LocalClient(EngineCore([loader], config=config, ledger=ledger))
        await client.load("tiny")
        given = [
            np.frombuffer(output.payload.vectors, "<f4")
            async for output in client.submit("tiny", request, job_id="x")
            if output.payload is not None and output.payload.vectors
        ]
        await client.close()
        ledger.check()
        return given

    return asyncio.run(ask())


@pytest.mark.parametrize("name", MODELS)
def test_vectors_are_those_of_the_class(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    resolved = save(model, tmp_path, "Normalize")
    assert kind_of(tmp_path, read_json(tmp_path / "config.json")) is ModelKind.CLASS
    with torch.inference_mode():
        states = [model(torch.tensor([text])).last_hidden_state[0] for text in TEXTS]
    wanted = [torch.nn.functional.normalize(state.mean(0), dim=0).numpy() for state in states]
    found = run(resolved, EmbedRequest(texts=TEXTS))
    np.testing.assert_allclose(np.stack(found), np.stack(wanted), atol=1e-5)


@pytest.mark.parametrize("name", SCORERS)
def test_scores_are_those_of_the_class(name: str, tmp_path: Path) -> None:
    model = SCORERS[name]()
    resolved = save(model, tmp_path)
    with torch.inference_mode():
        wanted = [model(torch.tensor([text])).logits.item() for text in TEXTS]
    found = run(resolved, EmbedRequest(texts=TEXTS, second_starts=(2, 4, 2, 1)))
    np.testing.assert_allclose(np.concatenate(found), wanted, atol=1e-4)


def test_every_type_has_a_class() -> None:
    tables = transformers.models.auto.modeling_auto
    known = {**tables.MODEL_MAPPING_NAMES, **tables.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES}
    assert known.keys() >= CLASS_ENCODERS


@pytest.mark.parametrize(("name", "embeds"), [("Model", True), ("ForCausalLM", False)])
def test_a_decoder_of_a_type_that_also_encodes_chats(
    name: str, embeds: bool, tmp_path: Path
) -> None:
    architectures = [f"ModernBertDecoder{name}"]
    config = {"model_type": "modernbert-decoder", "architectures": architectures}
    assert is_embedding_model(tmp_path, config) == embeds


def test_colbert_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="ColBERT"):
        kind_of(tmp_path, {"model_type": "bert", "architectures": ["HF_ColBERT"]})
