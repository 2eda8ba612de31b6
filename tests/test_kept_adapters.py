"""The adapters of the start after models have come and gone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from triptych.core.options.config import AdapterOptions, Config
from triptych.kept_adapters import with_base_model, without_gone


def place(folder: Path, name: str, task: str) -> str:
    (folder / name).mkdir()
    save_file({"x": torch.zeros(1)}, folder / name / "a.safetensors")
    (folder / name / "adapter_config.json").write_text(json.dumps({"task_type": task}))
    return f"{name}={folder / name}"


@pytest.mark.parametrize(
    ("removed", "added", "kept"),
    [
        ((), (), ["sql", "ink"]),
        ((), ("other",), ["sql", "ink"]),
        (("qwen",), (), ["ink"]),
        (("qwen",), ("qwen",), ["ink"]),
        ((), ("sql",), ["ink"]),
    ],
)
def test_adapters_of_models_that_are_gone_are_left_out(
    tmp_path: Path, removed: tuple[str, ...], added: tuple[str, ...], kept: list[str]
) -> None:
    paths = place(tmp_path, "sql", "CAUSAL_LM"), place(tmp_path, "ink", "")
    config = with_base_model(Config(adapters=AdapterOptions(lora_paths=paths)), ["qwen"])
    assert [each.base_model_name for each in config.adapters.places()] == ["qwen", "qwen"]
    found = without_gone(config, removed=removed, added=added)
    assert [each.name for each in found.adapters.places()] == kept
