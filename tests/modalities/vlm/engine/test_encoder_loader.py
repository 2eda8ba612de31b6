"""An engine of role encode: what it loads of a model, what it refuses, what it lets go of."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from support.page_peers import until
from support.roles import engine, role_config
from support.vision_models import save_model
from support.vision_world import see
from triptych.core.engine_api.job import Job
from triptych.core.engine_api.staged_plan import StagedPlan
from triptych.core.errors import ConfigError
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, ModelOptions
from triptych.core.options.speculation import SpeculationOptions
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.resolve import ResolvedModel
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
    with pytest.raises(ConfigError, match=f"^{flag}: tiny runs as a whole on transformers"):
        loader.load(lambda _: None)
    assert ledger.by_owner() == {}


def test_a_model_without_a_layer_that_predicts_is_refused_with_it(saved: ResolvedModel) -> None:
    config = Config(speculation=SpeculationOptions(speculative_algorithm="mtp"))
    loader = open_vision_loader(saved, config, Device.open("cpu"), Ledger(256 * MIB))
    with pytest.raises(ConfigError, match="--speculative-algorithm mtp: tiny has no layer"):
        loader.load(lambda _: None)


def test_a_model_of_text_has_nothing_to_encode(saved: ResolvedModel, tmp_path: Path) -> None:
    loader = LlmLoader(saved, config_of(tmp_path), Device.open("cpu"), Ledger(256 * MIB))
    with pytest.raises(ConfigError, match="tiny takes no images"):
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


async def test_an_encoder_that_scales_images_in_another_way_is_refused(
    saved: ResolvedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    shutil.copytree(saved.folder, other)
    file = other / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"image_mean": [0.1, 0.2, 0.3]}))
    reader = config_of(tmp_path, "prefill_and_decode")
    scaled = msgspec.structs.replace(saved, folder=str(other))
    with caplog.at_level(logging.WARNING):
        async with engine(config_of(tmp_path), tmp_path, saved), engine(reader, tmp_path, scaled):
            await until(lambda: "refused (format): Pages differ. compute" in caplog.text)


def test_on_a_cpu_an_image_is_sent_before_the_next_is_encoded(
    saved: ResolvedModel, tmp_path: Path
) -> None:
    ledger = Ledger(256 * MIB)
    loader = open_vision_loader(saved, config_of(tmp_path), Device.open("cpu"), ledger)
    loaded = loader.load(lambda _: None)
    for image in see(("a", 2), ("b", 2)).contents:
        job = Job(job_id=image.span.digest.hex(), model="tiny", request=image)
        loaded.scheduler.submit(job)
    proposal = loaded.scheduler.propose(0.0)
    assert proposal is not None
    plan = loaded.scheduler.book(proposal, 0, 0.0)
    loaded.close()
    assert isinstance(plan, StagedPlan)
    assert len(plan.rows) == 1
