"""An engine of role encode: what it loads of a model, what it refuses, what it lets go of."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.roles import role_config
from support.vision_models import save_model
from triptych.core.config import Config, ModelOptions
from triptych.core.devices.device import Device
from triptych.core.errors import ConfigError
from triptych.core.ledger import Ledger
from triptych.core.weights.resolve import ResolvedModel
from triptych.core.weights.tensors.checkpoint import Checkpoint
from triptych.modalities.llm.engine.loader import LlmLoader
from triptych.modalities.vlm.engine.encoder_loader import open_vision_loader

MIB = 2**20


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> ResolvedModel:
    folder = tmp_path_factory.mktemp("llava")
    save_model("llava", folder)
    return ResolvedModel(name="tiny", reference="x", folder=str(folder), digest="00")


def config_of(folder: Path, role: str = "encode") -> Config:
    address = f"unix:{folder}/features"
    return role_config(role, address, folder, encoder=address)


def test_the_encoder_is_loaded_and_nothing_of_the_language_model(
    saved: ResolvedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, names = Checkpoint.read, []

    def note(self: Checkpoint, name: str) -> torch.Tensor:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(Checkpoint, "read", note)
    ledger = Ledger(256 * MIB)
    loader = open_vision_loader(saved, config_of(tmp_path), Device.open("cpu"), ledger)
    loaded = loader.load(lambda _: None)
    owners = {"vision-weights", "activations", "vision-cache"}
    assert set(ledger.by_owner()) == {f"tiny/{owner}" for owner in owners}
    assert any("vision_tower" in name for name in names)
    assert not any("language_model" in name for name in names)
    loaded.close()
    assert ledger.by_owner() == {}
    assert not (tmp_path / "features").exists()
    assert "triptych-pages" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("role", ["encode", "prefill_and_decode"])
def test_a_model_that_runs_on_transformers_is_refused_by_name(
    role: str, saved: ResolvedModel, tmp_path: Path
) -> None:
    config = replace(config_of(tmp_path, role), models=ModelOptions(model_impl="transformers"))
    ledger = Ledger(256 * MIB)
    loader = open_vision_loader(saved, config, Device.open("cpu"), ledger)
    flag = "--pipeline-role encode" if role == "encode" else "--encoder-address"
    with pytest.raises(ConfigError, match=f"^{flag}: tiny runs on transformers"):
        loader.load(lambda _: None)
    assert ledger.by_owner() == {}


def test_a_model_of_text_has_nothing_to_encode(saved: ResolvedModel, tmp_path: Path) -> None:
    loader = LlmLoader(saved, config_of(tmp_path), Device.open("cpu"), Ledger(256 * MIB))
    with pytest.raises(ConfigError, match="tiny takes no pictures"):
        loader.load(lambda _: None)


def test_an_address_that_is_taken_leaves_nothing_behind(
    saved: ResolvedModel, tmp_path: Path
) -> None:
    ledger, config = Ledger(256 * MIB), config_of(tmp_path)
    first = open_vision_loader(saved, config, Device.open("cpu"), ledger).load(lambda _: None)
    second = Ledger(256 * MIB)
    with pytest.raises(ConfigError, match=r"--encoder-address .* cannot listen"):
        open_vision_loader(saved, config, Device.open("cpu"), second).load(lambda _: None)
    assert second.by_owner() == {}
    first.close()
