"""The embedded embedding model, for real: transformers' vectors, and texts that are near."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertModel

from triptych import EmbeddingPipeline
from triptych.core.options.config import ModelOptions
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import resolve
from triptych.modalities.embedding.source import MINILM

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]  # the first time fetches 90 MB
TEXTS = (
    "A kitten sleeps on the sofa.",
    "The cat is taking a nap.",
    "Share prices fell sharply on Monday.",
    "naïve café, 東京, \N{GRINNING FACE} and\ttabs",
    "one two three " * 80,
)


@pytest.fixture(scope="module")
def pipeline() -> Iterator[EmbeddingPipeline]:
    with EmbeddingPipeline.from_pretrained(progress=False, device="cpu", dtype="float32") as embed:
        yield embed


@torch.inference_mode()
def transformers_vectors() -> np.ndarray:
    """Mean of a text's states, normalized, as sentence-transformers runs this model."""
    resolved = resolve(
        MINILM.name, name=None, options=ModelOptions(), progress=SilentProgress(), sources=(MINILM,)
    )
    folder = Path(resolved.folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    vectors = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")
        states_TC = model(**ids).last_hidden_state[0]
        vectors.append(torch.nn.functional.normalize(states_TC.mean(0), dim=0))
    return torch.stack(vectors).numpy()


def test_vectors_equal_transformers(pipeline: EmbeddingPipeline) -> None:
    np.testing.assert_allclose(pipeline(TEXTS), transformers_vectors(), atol=1e-5)


def test_texts_of_one_meaning_are_near(pipeline: EmbeddingPipeline) -> None:
    kitten, cat, shares = pipeline(TEXTS[:3])
    assert kitten @ cat > 0.5
    assert max(kitten @ shares, cat @ shares) < 0.2
