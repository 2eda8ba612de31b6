"""What is refused because no model that is served could use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from triptych.core.config import Config, ImageOptions, ModelOptions
from triptych.core.errors import ConfigError
from triptych.core.weights.progress import SilentProgress
from triptych.roles import resolve_models


def test_adapters_need_an_image_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    models = ModelOptions(model=(str(tmp_path),))
    (model,) = resolve_models(Config(models=models), SilentProgress())
    assert model.folder == str(tmp_path)
    with_adapter = Config(models=models, images=ImageOptions(lora_paths=("ink=ink.safetensors",)))
    with pytest.raises(ConfigError, match="--lora-paths is for image models"):
        resolve_models(with_adapter, SilentProgress())
