"""The embedded voice's folder: loaded whole or not at all, refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.speech_models import setup_of
from support.voice_model import save_voice
from triptych.core.errors import ConfigError, WeightsError
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.tts.engine.loader import open_blueprint
from triptych.modalities.tts.engine.models.voice.blueprint import VoiceBlueprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_voice(tmp_path)
    return tmp_path


def load(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        blueprint = open_blueprint(checkpoint.config, setup_of(folder))
        assert isinstance(blueprint, VoiceBlueprint)
        blueprint.build(checkpoint, lambda _: None)
        blueprint.open_codec(num_rows=2, report=lambda _: None)


def change(folder: Path, name: str, value: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


def test_every_tensor_goes_where_it_belongs(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    with Checkpoint.open(folder) as checkpoint:
        blueprint = VoiceBlueprint(checkpoint.config, setup_of(folder))
        model = blueprint.build(checkpoint, lambda _: None)
    weight = model.io["output"].scores.weight
    assert torch.equal(weight, tensors["talker.output.scores.weight"])
    num_values = sum(t.numel() for name, t in tensors.items() if name.startswith("talker."))
    assert blueprint.weight_bytes() == 4 * num_values
    pitch = sum(t.numel() for name, t in tensors.items() if name.startswith("codec.pitch."))
    others = sum(t.numel() for name, t in tensors.items() if name.startswith("codec."))
    assert blueprint.codec_bytes() == 4 * (others + pitch)


def test_what_streams_keep_is_known_without_weights(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        blueprint = open_blueprint(checkpoint.config, setup_of(folder))
    codec = blueprint.open_codec(num_rows=3, report=lambda _: None)
    assert blueprint.codec_state_bytes(3) == codec.decoder.state_bytes > 0


@pytest.mark.parametrize(
    "name", ["talker.stack.norm.weight", "talker.input.held.weight", "codec.backbone.norm.bias"]
)
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    change(folder, name, None)
    with pytest.raises(WeightsError, match=name):
        load(folder)


@pytest.mark.parametrize("name", ["talker.stack.layers.7.extra", "codec.extra"])
def test_a_tensor_too_many_is_named(folder: Path, name: str) -> None:
    change(folder, name, torch.zeros(2))
    with pytest.raises(WeightsError, match=name):
        load(folder)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    change(folder, "codec.head.bias", torch.zeros(2))
    with pytest.raises(WeightsError, match=r"codec\.head\.bias"):
        load(folder)


def test_a_config_that_says_too_little_is_refused(folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"talker": {"unknown": 1}}))
    with pytest.raises(WeightsError, match="unknown"):
        load(folder)


@pytest.mark.parametrize("options", [{"audio_decoder": "x"}, {"buffer": 2}, {"block_causal": True}])
def test_options_of_other_decoders_are_refused(folder: Path, options: dict[str, object]) -> None:
    with Checkpoint.open(folder) as checkpoint, pytest.raises(ConfigError):
        VoiceBlueprint(checkpoint.config, setup_of(folder, **options))
