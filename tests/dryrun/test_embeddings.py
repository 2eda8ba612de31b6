"""Steps of embedding models: encoders of each kind over texts of many lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.dry_run import dry_run
from support.embedding_models import FAMILIES, save
from support.fake_cuda import FakeCuda
from triptych.core.options.config import Config
from triptych.modalities.embedding.engine.loader import EmbeddingLoader
from triptych.modalities.embedding.wire import EmbedRequest

TEXTS = tuple(tuple(range(4, 4 + length)) for length in (1, 9, 3, 9, 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_encoder(gpu: FakeCuda, tmp_path: Path, config: Config, family: str) -> None:
    save(tmp_path, family)
    run = dry_run(gpu, EmbeddingLoader, tmp_path, config)
    run.submit("a", EmbedRequest(texts=TEXTS))
    run.end_well()
    assert len(run.payloads("a")) == len(TEXTS)
    assert gpu.faults == []
    assert {count for counts in run.runner.reads.values() for count in counts} == {1}
