"""Loading a vision model, and steps of its encoder: memory, faults named, what is kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.child_processes import ranks_of
from support.image_prompts import join_prompt
from support.vision_models import pixels, save_model
from triptych.core.engine_api.plan import StepResult
from triptych.core.engine_api.prompt_content import Array, ContentSpan, PromptContent
from triptych.core.errors import (
    InvalidRequest,
    MemoryBudgetExceeded,
    ModelTooLarge,
    NonFinite,
    WeightsError,
)
from triptych.core.ledger import Ledger
from triptych.core.options.config import (
    CacheOptions,
    Config,
    DeviceOptions,
    ModelOptions,
    ScheduleOptions,
)
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.engine.ranks import LeadingRunner, Ranks
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.vlm.engine.loader import VisionLoader
from triptych.modalities.vlm.engine.runner import VisionRunner
from triptych.modalities.vlm.plan import EncodePlan
from triptych.modalities.vlm.processing.processor import ImageProcessor

MIB = 2**20
CONFIG = Config(
    schedule=ScheduleOptions(max_batch_size=4), cache=CacheOptions(max_vision_cache_entries=3)
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    save_model("llava", folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def loader(folder: Path, ledger: Ledger, config: Config = CONFIG) -> VisionLoader:
    resolved = ResolvedModel(name="tiny", reference="x", folder=str(folder), digest="00")
    return VisionLoader(resolved, config, Device.open("cpu"), ledger)


def edit(folder: Path, **edits: torch.Tensor | None) -> None:
    """Replace tensors (dots as double underscores), or remove them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in edits.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_vision_model_holds_memory_until_it_is_closed(saved: Path) -> None:
    ledger, progress = Ledger(256 * MIB), []
    loaded = loader(saved, ledger).load(progress.append)
    owners = {"weights", "vision-weights", "activations", "vision-cache", "kv"}
    assert set(ledger.by_owner()) == {f"tiny/{owner}" for owner in owners}
    assert progress == sorted(progress)
    assert progress[-1] == 1.0
    loaded.close()
    assert ledger.by_owner() == {}


def test_the_cache_takes_what_so_many_images_take(saved: Path) -> None:
    def cache_bytes(max_entries: int) -> int:
        cache = replace(CONFIG.cache, max_vision_cache_entries=max_entries)
        ledger = Ledger(2**33)
        loader(saved, ledger, replace(CONFIG, cache=cache)).load(lambda _: None)
        return ledger.by_owner()["tiny/vision-cache"]

    hidden_bytes = 32 * 4
    assert cache_bytes(256) == 256 * 1024 * hidden_bytes
    assert cache_bytes(0) == cache_bytes(1) == 8192 * hidden_bytes  # those of one step


def test_without_room_nothing_is_held(saved: Path) -> None:
    ledger = Ledger(4 * MIB)
    with pytest.raises(MemoryBudgetExceeded, match="tiny"):
        loader(saved, ledger).load(lambda _: None)
    assert ledger.by_owner() == {}


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("vision_tower__embeddings__class_embedding", None),
        ("multi_modal_projector__linear_1__weight", torch.zeros(3, 3)),
        ("vision_tower__something__weight", torch.zeros(3)),
        ("language_model__model__norm__weight", None),
        ("language_model__model__layers__9__weight", torch.zeros(3)),
    ],
)
def test_weights_that_do_not_fit_are_named(
    folder: Path, name: str, tensor: torch.Tensor | None
) -> None:
    edit(folder, **{name: tensor})
    ledger = Ledger(256 * MIB)
    with pytest.raises(WeightsError, match=name.split("__")[-2]):
        loader(folder, ledger).load(lambda _: None)
    assert ledger.by_owner() == {}


def test_a_model_without_an_image_processor_is_refused(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(WeightsError, match="preprocessor_config"):
        loader(folder, Ledger(256 * MIB)).load(lambda _: None)


def test_fields_of_the_text_in_addition_to_the_others_are_read(tmp_path: Path) -> None:
    """Configurations of Qwen2-VL on the hub have no `text_config`."""
    save_model("qwen2_vl", tmp_path)
    nested = json.loads((tmp_path / "config.json").read_text())
    text = nested.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = {**text, **nested, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    loaded = loader(tmp_path, Ledger(256 * MIB)).load(lambda _: None)
    loaded.close()


@pytest.mark.parametrize("name", ["llava", "idefics3", "mistral3"])
def test_known_models_run_on_transformers_decoder_too(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    config = replace(CONFIG, models=ModelOptions(model_impl="transformers"))
    loaded = loader(tmp_path, Ledger(256 * MIB), config).load(lambda _: None)
    images = images_of(tmp_path, 1, 2)
    assert encode(loaded.runner, *images).rows == [None, None]
    loaded.close()


def test_tied_embeddings_are_not_called_damaged(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    edit(folder, lm_head__weight=None)
    fields = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(fields))
    loader(folder, Ledger(256 * MIB)).load(lambda _: None).close()
    assert "corrupted" not in caplog.text


def images_of(folder: Path, *seeds: int) -> tuple[PromptContent, ...]:
    made = ImageProcessor.open(folder, model="m")
    prepared = [made.prepare(pixels(30, 30, seed)) for seed in seeds]
    return join_prompt(prepared, lambda _: []).images


def encode(runner: Any, *images: PromptContent) -> StepResult:
    plan = EncodePlan(step_id=0, model="tiny", kind="encode", images=images)
    result = runner.launch(plan).result()
    assert isinstance(result, StepResult)
    return result


def test_a_tower_is_divided_over_processes(saved: Path, runner: VisionRunner) -> None:
    """Each has its part of the tower; the other gets an image's pixels, and gives no features."""
    device = DeviceOptions(device="cpu", tensor_parallel_size=2, threads=1)
    ledger, whole, images = Ledger(256 * MIB), Ledger(256 * MIB), images_of(saved, 1, 2)
    loaded = loader(saved, ledger, replace(CONFIG, device=device)).load(lambda _: None)
    loader(saved, whole).load(lambda _: None)
    assert len(ranks_of()) == 1
    assert isinstance(loaded.runner, LeadingRunner)
    assert encode(loaded.runner, *images).rows == encode(runner, *images).rows == [None, None]
    found = loaded.runner._runner
    assert isinstance(found, VisionRunner)
    for image in images:
        ours, theirs = (each._features.acquire(image.span.digest) for each in (found, runner))
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours.hidden_NC, theirs.hidden_NC, atol=1e-5, rtol=1e-5)
    both, one = (each.by_owner()["tiny/vision-weights"] for each in (ledger, whole))
    assert one < both < 1.5 * one  # embeddings and norms are on both
    loaded.close()
    assert not ranks_of()


def test_a_divided_model_is_measured_without_its_ranks(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = DeviceOptions(device="cpu", tensor_parallel_size=2, threads=1)
    divided, ledger = replace(CONFIG, device=device), Ledger(256 * MIB)
    loaded = loader(saved, ledger, divided).load(lambda _: None)
    held = ledger.by_owner()
    loaded.close()
    monkeypatch.setattr(Ranks, "start", None)
    others = sum(held.values()) - held["tiny/kv"] - held["tiny/vision-cache"]
    loader(saved, ledger, divided).check_size()
    with pytest.raises(ModelTooLarge, match="tiny can never fit"):
        loader(saved, Ledger(others), divided).check_size()


@pytest.mark.parametrize("name", ["llava", "paligemma"])
def test_another_rank_takes_no_more_memory_than_the_first(name: str, tmp_path: Path) -> None:
    """It learns how many pages there are of the first, which has them of all that is left."""
    save_model(name, tmp_path)
    place: Any = SimpleNamespace(rank=1, num_ranks=2)
    first, other = Ledger(256 * MIB), Ledger(256 * MIB)
    loader(tmp_path, first).load(lambda _: None)

    class RankPlan:
        taken: Mapping[str, int]

        def capacity(self, kind: type) -> object:
            self.taken = other.by_owner()
            raise EOFError

    plans: Any = RankPlan()
    with pytest.raises(EOFError):
        loader(tmp_path, other).follow(plans, place, lambda: None)
    whole = first.by_owner()
    assert set(plans.taken) == {
        f"tiny/{each}" for each in ("weights", "vision-weights", "activations")
    }
    assert plans.taken["tiny/activations"] == whole["tiny/activations"]  # the tower's, on any rank
    assert all(num_bytes <= whole[owner] for owner, num_bytes in plans.taken.items())
    assert not other.by_owner()


@pytest.fixture
def runner(saved: Path) -> VisionRunner:
    loaded = loader(saved, Ledger(256 * MIB)).load(lambda _: None)
    assert isinstance(loaded.runner, VisionRunner)
    return loaded.runner


def test_features_are_the_same_alone_and_in_any_batch(runner: VisionRunner, saved: Path) -> None:
    first, second = images_of(saved, 1, 2)
    assert encode(runner, first, second).rows == [None, None]
    together = [runner._features.acquire(p.span.digest) for p in (first, second)]
    assert runner._features.num_references == 4
    for image in (first, second) * 2:
        runner._features.release(image.span.digest)
    runner._features.clear()
    for image, shared in zip((first, second), together, strict=True):
        encode(runner, image)
        alone = runner._features.acquire(image.span.digest)
        assert alone is not None
        assert shared is not None
        torch.testing.assert_close(alone.hidden_NC, shared.hidden_NC, atol=1e-6, rtol=0)


def test_kept_features_keep_nothing_else_alive(runner: VisionRunner, saved: Path) -> None:
    images = images_of(saved, 1, 2, 3)
    encode(runner, *images)
    for image in images:
        kept = runner._features.acquire(image.span.digest)
        assert kept is not None
        assert kept.hidden_NC.untyped_storage().nbytes() == kept.num_bytes


def test_an_image_that_does_not_fit_its_span_is_refused(runner: VisionRunner, saved: Path) -> None:
    (good,) = images_of(saved, 1)
    span = ContentSpan(digest=b"x", runs=((0, 5),))
    (error,) = encode(runner, PromptContent(span=span, inputs=good.inputs)).rows
    assert isinstance(error, InvalidRequest)
    assert len(runner._features) == 0


def test_an_image_of_nan_fails_alone(runner: VisionRunner, saved: Path) -> None:
    good, other = images_of(saved, 1, 2)
    shape = other.inputs["pixel_values"].shape
    nan = torch.full(shape, torch.nan).numpy().tobytes()
    bad = PromptContent(span=other.span, inputs={"pixel_values": Array("float32", shape, nan)})
    first, second = encode(runner, good, bad).rows
    assert first is None
    assert isinstance(second, NonFinite)
    assert len(runner._features) == 1
