"""What is refused because no model that is served could use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes_serve import write_model

from triptych import ChatPipeline
from triptych.core.errors import ConfigError
from triptych.core.options import resolve_keywords
from triptych.core.weights.progress import SilentProgress
from triptych.modalities.registry import resolve_models

STRANGE: tuple[dict[str, Any], ...] = (
    {"lora_paths": ("ink=ink.safetensors",)},
    {"audio_decoder": "/nope", "chunk_size": 7},
    {"teacache": True},
    {"max_vision_cache_entries": 0},
)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(write_model(tmp_path / "text"))


@pytest.mark.parametrize("options", STRANGE)
def test_options_of_models_that_are_not_served(folder: str, options: dict[str, Any]) -> None:
    (model,) = resolve_models(resolve_keywords({"model": folder}), SilentProgress())
    assert model.folder == folder
    with pytest.raises(ConfigError, match=f"^{next(iter(options))}.* for .* models"):
        resolve_models(resolve_keywords({"model": folder, **options}), SilentProgress())


def test_a_chat_model_embeds_too(folder: str) -> None:
    resolve_models(resolve_keywords({"model": folder, "pool_embeddings": False}), SilentProgress())


@pytest.mark.parametrize("options", [*STRANGE, {"pool_embeddings": False}])
def test_options_of_other_pipelines(folder: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(options))}.* for .* models"):
        ChatPipeline.from_pretrained(folder, progress=False, **options)
