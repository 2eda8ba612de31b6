"""Files in the shapes of published models: our own reader converts them, and a step computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.samples import SAMPLES, importing_samples
from triptych.core.weights.gguf.convert import convert_gguf
from triptych.core.weights.progress import SilentProgress

SMALL: dict[str, dict[str, int]] = {
    "gpt-oss": {"width": 64, "num_layers": 2, "num_experts": 4},
    "gemma4": {"width": 64, "num_layers": 10, "inner": 64, "inputs": 32},
    "qwen35": {"width": 64, "num_layers": 4, "inner": 64},
}


@pytest.fixture(scope="module")
def shapes() -> Iterator[Any]:
    with importing_samples(SAMPLES / "benchmarks"):
        import shapes

        yield shapes


@pytest.mark.parametrize("name", SMALL)
def test_a_file_in_a_published_shape_runs_a_step(shapes: Any, name: str, tmp_path: Path) -> None:
    shape = shapes.SHAPES[name](**SMALL[name])
    file, folder = tmp_path / "model.gguf", tmp_path / "model"
    folder.mkdir()
    assert shapes.write_shape(shape, file) > 0
    convert_gguf(file, folder, SilentProgress())
    decoder = shapes.load(folder, shape.encoding, torch.float32, None)
    with torch.inference_mode():
        calls = dict(shapes.calls_of({"own": decoder}, None, 2, None))
        assert calls["own"]() > 0
