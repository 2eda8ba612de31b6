"""Pairs of texts get the scores that transformers gives them one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.embedding_models import CROSS_ENCODERS, save_cross_encoder
from triptych.core.errors import WeightsError
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.embedding.architecture import EncoderSizes, is_cross_encoder
from triptych.modalities.embedding.engine.encoder import load_encoder
from triptych.modalities.embedding.engine.runner import Embedder
from triptych.modalities.embedding.engine.score_head import load_score_head
from triptych.modalities.embedding.pooling import PoolingSpec
from triptych.modalities.embedding.wire import EmbedRequest

CPU = torch.device("cpu")
TOLERANCE = 1e-5
"""In float32, of scores that lie between about -3 and 3."""
PAIRS = [
    ([3, 5, 6, 2], [7, 8, 9, 2]),
    ([3, 5, 2], list(range(10, 50))),
    ([3, *range(4, 30), 2], [9, 2]),
    ([3, 5, 6, 2], [9, 8, 7, 2]),
    ([3, 40, 2], [41, 2]),
]


def scores(folder: Path, pairs: list[tuple[list[int], list[int]]]) -> list[float]:
    with Checkpoint.open(folder) as checkpoint:
        encoder = load_encoder(checkpoint, dtype=torch.float32, device=CPU)
        spec = PoolingSpec.of(folder, checkpoint.config)
        head = load_score_head(checkpoint, EncoderSizes.read(checkpoint.config), CPU)
    embedder = Embedder(encoder, spec, head)
    request = EmbedRequest(
        texts=tuple((*first, *second) for first, second in pairs),
        second_starts=tuple(len(first) for first, _ in pairs),
    )
    works = [embedder.begin(request, unit) for unit in range(len(pairs))]
    with torch.inference_mode():
        fetches = embedder.advance(works)
    data = b"".join(fetch().vectors for fetch in fetches)
    return torch.frombuffer(bytearray(data), dtype=torch.float32).tolist()


@torch.inference_mode()
def expected(model: Any, first: list[int], second: list[int]) -> float:
    given = {"input_ids": torch.tensor([[*first, *second]])}
    if getattr(model.config, "type_vocab_size", 1) > 1:
        types = [0] * len(first) + [1] * len(second)
        given["token_type_ids"] = torch.tensor([types])
    score: float = model(**given).logits.item()
    return score


@pytest.mark.parametrize("kind", sorted(CROSS_ENCODERS))
def test_equals_transformers(kind: str, tmp_path: Path) -> None:
    _, model = save_cross_encoder(tmp_path, kind)
    wanted = [expected(model, *pair) for pair in PAIRS]
    assert max(wanted) - min(wanted) > 0.1, "a score that says nothing proves nothing"
    assert scores(tmp_path, PAIRS) == pytest.approx(wanted, abs=TOLERANCE)
    for pair, value in zip(PAIRS, wanted, strict=True):
        assert scores(tmp_path, [pair]) == pytest.approx([value], abs=TOLERANCE)


def test_where_the_second_text_begins_matters(tmp_path: Path) -> None:
    save_cross_encoder(tmp_path)
    whole = [1, 5, 6, 2, 7, 8, 2]
    early, late = scores(tmp_path, [(whole[:2], whole[2:]), (whole[:5], whole[5:])])
    assert abs(early - late) > 1e-3


def test_a_head_that_is_not_there_is_named(tmp_path: Path) -> None:
    save_cross_encoder(tmp_path, "roberta")
    with Checkpoint.open(tmp_path) as checkpoint:
        sizes = EncoderSizes.read({**checkpoint.config, "model_type": "bert"})
        with pytest.raises(WeightsError, match=r"pooler\.dense"):
            load_score_head(checkpoint, sizes, CPU)


@pytest.mark.parametrize(
    ("config", "is_one"),
    [
        ({"id2label": {"0": "LABEL_0"}}, True),
        ({"num_labels": 1}, True),
        ({"id2label": {"0": "no", "1": "yes"}}, False),
        ({}, False),
        ({"model_type": "t5", "num_labels": 1}, True),
        ({"architectures": ["BertModel"], "num_labels": 1}, False),
    ],
)
def test_one_label_makes_a_cross_encoder(config: dict[str, Any], is_one: bool) -> None:
    base = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    assert is_cross_encoder(base | config) is is_one
