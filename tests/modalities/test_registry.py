"""Which models there are, what each is for, and options that none of them reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.eagle import save_head
from support.serve_process import write_model
from support.text_models import byte_tokenizer
from triptych import ChatPipeline
from triptych.core.errors import ConfigError
from triptych.core.options.table import resolve_keywords
from triptych.core.weights.layout import read_json
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import EMBEDDED_REFERENCE, ResolvedModel
from triptych.modalities.registry import (
    MODALITIES,
    default_models,
    known_sources,
    resolve_models,
    role_of,
)

STRANGE: tuple[dict[str, Any], ...] = (
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


@pytest.mark.parametrize(
    ("config", "role"),
    [
        ({"model_type": "kokoro"}, "speech"),
        ({"model_type": "triptych_voice"}, "speech"),
        ({"model_type": "csm"}, "speech"),
        ({"model_type": "whisper"}, "asr"),
        ({"model_type": "llama", "speech": {"kind": "orpheus"}}, "speech"),
        ({"model_type": "bert"}, "embedding"),
        ({"model_type": "idefics3", "vision_config": {}}, "vision"),
        ({"model_type": "llama"}, "chat"),
        ({}, "chat"),
    ],
)
def test_config_decides_the_role_of_a_model(
    tmp_path: Path, config: dict[str, Any], role: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert role_of(ResolvedModel(name="m", reference="m", folder=str(tmp_path), digest="")) == role


def test_defaults_have_names_of_their_own() -> None:
    own = {source.name for source in known_sources()}
    assert set(default_models()) <= {EMBEDDED_REFERENCE, *own}
    assert default_models()[0] == EMBEDDED_REFERENCE  # clients take the first that is listed
    assert len(set(default_models())) == sum(bool(each.default) for each in MODALITIES)


def test_a_smaller_model_drafts_for_the_text_models_of_its_vocabulary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = {name: write_model(tmp_path / name) for name in ("big", "other", "small")}
    for name, token in (("big", "<a>"), ("other", "<b>"), ("small", "<a>")):
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens([token])
        tokenizer.save(str(folders[name] / "tokenizer.json"))
    resolved = resolve_keywords(
        {
            "model": tuple(f"{name}={folder}" for name, folder in folders.items()),
            "speculative_algorithm": "standalone",
            "draft_model_path": str(folders["small"]),
        }
    )
    with caplog.at_level("INFO"):
        models = resolve_models(resolved, SilentProgress())
    assert {model.name for model in models if model.draft} == {"big"}
    assert "small drafts for big; other models have no drafts" in caplog.text


@pytest.mark.parametrize("sees", [False, True])
def test_a_head_drafts_for_the_models_of_its_size(tmp_path: Path, sees: bool) -> None:
    folders = {name: write_model(tmp_path / name) for name in ("big", "other")}
    own = read_json(folders["big"] / "config.json")
    size = own["hidden_size"]
    if sees:
        whole = {"model_type": "llava", "text_config": own, "vision_config": {"hidden_size": 8}}
        (folders["big"] / "config.json").write_text(json.dumps(whole))
    wider = read_json(folders["other"] / "config.json") | {"hidden_size": 2 * size}
    (folders["other"] / "config.json").write_text(json.dumps(wider))
    save_head(tmp_path / "head", target_hidden_size=size)
    resolved = resolve_keywords(
        {
            "model": tuple(f"{name}={folder}" for name, folder in folders.items()),
            "speculative_algorithm": "eagle3",
            "draft_model_path": str(tmp_path / "head"),
        }
    )
    models = resolve_models(resolved, SilentProgress())
    assert {model.name for model in models if model.draft} == {"big"}


def test_a_smaller_model_for_models_that_see_alone_is_refused_when_they_load(
    tmp_path: Path, folder: str
) -> None:
    """It is theirs, so that they name the reason; next to a text model it is that one's."""
    seeing = write_model(tmp_path / "seeing")
    whole = {"model_type": "llava", "text_config": {}, "vision_config": {"hidden_size": 8}}
    (seeing / "config.json").write_text(json.dumps(whole))
    small = str(write_model(tmp_path / "small"))
    for models, drafted in (([seeing], {"seeing"}), ([seeing, folder], {"text"})):
        resolved = resolve_keywords(
            {
                "model": tuple(f"{Path(model).name}={model}" for model in models),
                "speculative_algorithm": "standalone",
                "draft_model_path": small,
            }
        )
        found = resolve_models(resolved, SilentProgress())
        assert {model.name for model in found if model.draft} == drafted


def test_a_pipeline_has_the_drafts_that_it_is_given(folder: str, tmp_path: Path) -> None:
    options = {"speculative_algorithm": "eagle3", "draft_model_path": folder}
    with pytest.raises(ConfigError, match="text is no EAGLE-3 head"):
        ChatPipeline.from_pretrained(str(write_model(tmp_path / "big")), progress=False, **options)
