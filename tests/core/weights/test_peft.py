"""Damaged and unusual adapters are refused by name when their headers are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.weights.peft import TextAdapter, locate_adapter

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
PAIR = {f"{MODULE}.lora_A.weight": (4, 8), f"{MODULE}.lora_B.weight": (8, 4)}
CONFIG = {"r": 4, "lora_alpha": 8}


def read(folder: Path, tensors: dict[str, tuple[int, ...]], config: dict[str, Any]) -> TextAdapter:
    save_file(
        {name: torch.zeros(shape) for name, shape in tensors.items()}, folder / "a.safetensors"
    )
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return TextAdapter.read(str(folder), ModelOptions())


def test_a_whole_adapter_is_read(tmp_path: Path) -> None:
    config = CONFIG | {"rank_pattern": {r"layers\.\d+\.(self_attn|mlp)\.q_proj": 4}, "r": 2}
    assert read(tmp_path, PAIR, config).max_rank == 4


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({f"{MODULE}.lora_A.weight": ()}, {}, r"has shape \[\]"),
        ({f"{MODULE}.lora_A.weight": (0, 8), f"{MODULE}.lora_B.weight": (8, 0)}, {}, "matrix"),
        ({f"{MODULE}.lora_A.other.weight": (4, 8)}, {}, "same part"),
        ({f"{MODULE[17:]}.lora_A.weight": (4, 8)}, {}, "same part"),
        ({f"{MODULE}.lora_embedding_{side}": (4, 4) for side in "AB"}, {}, "two LoRAs"),
        ({f"{'x' * 300}.lora_A.weight": (4, 8)}, {}, "too long"),
        ({}, {"lora_alpha": 10**400}, "numbers up to"),
        ({}, {"r": 10**400}, "numbers up to"),
        ({}, {"lora_alpha": float("nan")}, "numbers up to"),
        ({}, {"r": 5}, "says 5"),
        ({}, {"rank_pattern": {"(" * 3000: 4}}, "rank_pattern"),
        ({}, {"alpha_pattern": {"a{" + "9" * 30 + "}": 4}}, "alpha_pattern"),
        ({}, {"alpha_pattern": ["q_proj"]}, "alpha_pattern"),
    ],
)
def test_what_is_damaged_is_refused(
    tmp_path: Path, tensors: dict[str, tuple[int, ...]], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(WeightsError, match=message):
        read(tmp_path, PAIR | tensors, CONFIG | config)


@pytest.mark.parametrize(
    "place", ["~no-such-user-here/x.safetensors", "/" + "x" * 300, "/x\0y.safetensors", "/\0"]
)
def test_a_place_that_cannot_be_is_refused(place: str) -> None:
    with pytest.raises(WeightsError):
        TextAdapter.read(place, ModelOptions(offline=True))


def test_a_folder_that_may_not_be_searched_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(WeightsError, match="Permission denied"):
        locate_adapter(str(tmp_path), ModelOptions())
