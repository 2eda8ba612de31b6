"""Loading an image model: what it takes, what it gives back, and what it can generate."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import avg_pool2d

from support.engine_seams import FakeFrames, FakeLoader, FrameRunner
from support.image_folders import save_pipeline
from support.image_runner import PIPELINE, RunnerDriver, image_request, open_executor
from support.kernel_levels import cache_with_kernels
from support.load_bench import LoadBench
from support.rank_threads import open_gloo
from triptych.core.errors import (
    InvalidRequest,
    MemoryBudgetExceeded,
    ModelTooLarge,
    WeightsError,
)
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, DeviceOptions, ImageOptions, ModelOptions
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.devices.rank_group import RankGroup
from triptych.core.runtime.engine.ranks import Plans, Ranks
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.diffusion.engine import loader as diffusion_loader
from triptych.modalities.diffusion.engine.caches.methods import Level
from triptych.modalities.diffusion.engine.costs import GenerationCosts
from triptych.modalities.diffusion.engine.latent_decoder import FILE_NAME, LatentDecoder, Preview
from triptych.modalities.diffusion.engine.loader import DiffusionLoader, measure
from triptych.modalities.diffusion.engine.recipes.recipe import Recipe
from triptych.modalities.diffusion.engine.runner import DenoiseRunner
from triptych.modalities.diffusion.plan import DenoisePlan, ImageKey, ImageStart
from triptych.modalities.diffusion.wire import AdapterUse, ImageRequest, StepCache
from triptych.schedulers.base import LoadedModel

MANY = 2**31


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_pipeline(folder, PIPELINE)
    return folder


def open_loader(
    folder: Path, ledger: Ledger, cache_dir: Path, cfg_parallel_size: int = 1, **images: Any
) -> DiffusionLoader:
    config = Config(
        models=ModelOptions(cache_dir=str(cache_with_kernels(cache_dir)), dtype="float32"),
        device=DeviceOptions(cfg_parallel_size=cfg_parallel_size, threads=torch.get_num_threads()),
        images=ImageOptions(**images),
    )
    resolved = ResolvedModel(name="m", reference=str(folder), folder=str(folder), digest="d")
    return DiffusionLoader(resolved, config, Device(torch.device("cpu")), ledger)


def load(folder: Path, ledger: Ledger, cache_dir: Path, **images: Any) -> LoadedModel:
    loader = open_loader(folder, ledger, cache_dir, **images)
    progress: list[float] = []
    loaded = loader.load(progress.append)
    assert progress == sorted(progress)
    assert progress[-1] == pytest.approx(1.0)
    return loaded


def executor_of(loaded: LoadedModel) -> Any:
    assert isinstance(loaded.runner, DenoiseRunner)
    return loaded.runner._executor


def test_every_byte_has_an_owner_and_comes_back(folder: Path, tmp_path: Path) -> None:
    ledger = Ledger(MANY)
    loaded = load(folder, ledger, tmp_path)
    held = ledger.by_owner()
    assert held.keys() == {
        f"m/{name}"
        for name in ("transformer", "text_encoder", "vae", "prompts", "activations", "images")
    }
    executor = executor_of(loaded)
    model = executor.recipe.model
    assert held["m/transformer"] == sum(tensor.nbytes for tensor in model.parameters())
    driver = RunnerDriver(executor)
    driver.encode(image_request())
    driver.run("release", dropped=tuple(driver.runner._images))
    loaded.close()
    assert ledger.available_bytes == MANY
    ledger.check()


class _ToldPlans:
    """In place of `core.runtime.engine.ranks.Plans`: rank 0 has little room, and one image."""

    def capacity(self, kind: type[int]) -> int:
        return 64 * 64 - 1

    def run(self, launch: Callable[[DenoisePlan], Any], kind: type[DenoisePlan]) -> None:
        start = ImageStart(key=ImageKey("a", 0), request=image_request())
        launch(kind(step_id=0, model="m", kind="encode", starts=(start,)))
        launch(kind(step_id=1, model="m", kind="release", dropped=(start.key,)))


def test_a_rank_takes_images_apart_where_rank_0_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own memory has room for the whole image; what it begins from would come to differ."""
    tiled: list[bool] = []
    make_room = LatentDecoder.make_room

    def watched(self: LatentDecoder, request: ImageRequest) -> None:
        make_room(self, request)
        tiled.append(self._recipe.vae.use_tiling)

    monkeypatch.setattr(LatentDecoder, "make_room", watched)
    loader = open_loader(folder, Ledger(MANY), tmp_path, cfg_parallel_size=2)
    group = RankGroup(dist.HashStore(), 0, 1, open_gloo)
    loader.follow(cast("Plans", _ToldPlans()), group, lambda: None)
    assert tiled == [True]


def test_closing_with_images_under_way_lets_go_of_them(folder: Path, tmp_path: Path) -> None:
    ledger = Ledger(MANY)
    loaded = load(folder, ledger, tmp_path)
    driver = RunnerDriver(executor_of(loaded))
    driver.runner = cast("DenoiseRunner", loaded.runner)
    driver.encode(image_request(), image_request(seed=9))
    loaded.close()
    assert ledger.available_bytes == MANY


@pytest.mark.parametrize("left_out", ["transformer", "prompts", "activations"])
def test_a_model_that_does_not_fit_holds_nothing(
    folder: Path, tmp_path: Path, left_out: str
) -> None:
    loaded = load(folder, plenty := Ledger(MANY), tmp_path)
    before = ("text_encoder", "vae", "transformer", "prompts", "activations")
    held = plenty.by_owner()
    budget = sum(held[f"m/{name}"] for name in before[: before.index(left_out)]) + 1000
    loaded.close()
    ledger = Ledger(budget)
    with pytest.raises(MemoryBudgetExceeded, match=f"m/{left_out}"):
        load(folder, ledger, tmp_path)
    assert ledger.available_bytes == budget


def _refused(attempt: Callable[[], Any]) -> str | None:
    """The message, where the model can never fit."""
    try:
        attempt()
    except ModelTooLarge as error:
        return error.message
    return None


def _unread(*_: Any, **__: Any) -> Any:
    raise AssertionError("weights are read, or ranks started")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its images are large."""
    folder = tmp_path_factory.mktemp("large")
    save_pipeline(folder, PIPELINE)
    index = folder / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "default_size": 1024}))
    return folder


@pytest.fixture(scope="module")
def weight_bytes(large: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """What it holds beside what generation takes."""
    model = open_loader(large, ledger := Ledger(MANY), tmp_path_factory.mktemp("cache"))
    with ExitStack() as stack:
        model._reserve(model._memory(stack))
        held = ledger.by_owner()
    return sum(held.values()) - held["m/activations"] - held["m/images"]


@pytest.mark.parametrize(
    "case",
    [
        (-1, "Quantized weights take less memory", {}),
        (0, "Weights in fewer bits leave more for images: --quantization-encoding", {}),
        (20, r"Smaller images fit: --max-image-pixels \d+\. Weights in fewer bits leave", {}),
        (60, r"--max-image-pixels \d+\. ", {}),
        (76, "", {}),
        (100, r"fits with --image-memory-mb \d+\.", {"image_memory_mb": 60}),
        (200, "", {"image_memory_mb": 60}),
    ],
)
def test_what_never_fits_is_known_beforehand_and_the_advice_is_good(
    large: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weight_bytes: int,
    case: tuple[int, str, dict[str, int]],
) -> None:
    """The check reads no weights, and agrees with the load."""
    spare_mib, advice, images = case
    ledger = Ledger(weight_bytes + spare_mib * 2**20)
    model = open_loader(large, ledger, tmp_path, **images)
    with monkeypatch.context() as patch:
        patch.setattr(diffusion_loader, "open_components", _unread)
        refusal = _refused(model.check_size)
        if refusal is not None:
            assert refusal == _refused(lambda: model.load(lambda done: None))
    assert ledger.available_bytes == ledger.capacity_bytes
    assert (refusal is None) == (not advice)
    if refusal is not None:
        assert refusal.startswith("m can never fit: it needs ")
        assert re.search(advice, refusal)
        option = re.search(r"--(max-image-pixels|image-memory-mb) (\d+)", refusal)
        if option is None:
            return
        images = {**images, option[1].replace("-", "_"): int(option[2])}
        assert _refused(open_loader(large, ledger, tmp_path, **images).check_size) is None


@pytest.mark.parametrize(("num_ranks", "fits"), [(1, True), (2, False), (3, True)])
def test_a_divided_model_is_measured_without_its_ranks(
    large: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weight_bytes: int,
    num_ranks: int,
    fits: bool,
) -> None:
    """On a CPU all ranks take from one memory."""
    monkeypatch.setattr(Ranks, "start", _unread)
    num_shares = 3 if num_ranks == 3 else 1
    ledger = Ledger(num_shares * (weight_bytes + 100 * 2**20))
    model = open_loader(large, ledger, tmp_path, cfg_parallel_size=num_ranks)
    assert (_refused(model.check_size) is None) == fits
    assert ledger.available_bytes == ledger.capacity_bytes


def test_a_model_whose_images_never_fit_pushes_no_other_out(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight_bytes: int
) -> None:
    """Its weights would fit where the other model is."""
    monkeypatch.setattr(diffusion_loader, "open_components", _unread)
    ledger = Ledger(weight_bytes + 20 * 2**20)
    half = ledger.capacity_bytes // 2
    chat = FakeLoader("chat", lambda: (FakeFrames("chat"), FrameRunner()), ledger, half)
    image = open_loader(large, ledger, tmp_path)
    bench = LoadBench(chat, image, ledger=ledger, config=Config())
    for job_id, model in (("first", "chat"), ("job", "m")):
        bench.submit(job_id, model)
        bench.finish(job_id)
    assert bench.codes("first", "job") == [None, "model_too_large"]
    assert chat.num_closed == 0


def test_a_damaged_model_holds_nothing(tmp_path: Path) -> None:
    save_pipeline(tmp_path / "model", PIPELINE)
    (weights,) = (tmp_path / "model" / "transformer").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    ledger = Ledger(MANY)
    with pytest.raises(WeightsError, match="transformer"):
        load(tmp_path / "model", ledger, tmp_path)
    assert ledger.available_bytes == MANY


def test_a_map_next_to_the_model_generates_its_previews(tmp_path: Path) -> None:
    save_pipeline(tmp_path / "model", PIPELINE)
    path = tmp_path / "model" / FILE_NAME
    save_file({"weight": torch.zeros(3, 4), "bias": torch.tensor([0.0, 0.2, 1.0])}, path)
    loaded = load(tmp_path / "model", Ledger(MANY), tmp_path)
    generated = executor_of(loaded)._decoder._preview.colours(torch.randn(4, 5, 6))
    assert generated.shape == (3, 5, 6)
    assert generated[:, 2, 3].tolist() == pytest.approx([0.0, 0.2, 1.0])
    loaded.close()
    for spoiled in (
        {"weight": torch.zeros(4, 3), "bias": torch.zeros(3)},
        {"bias": torch.zeros(3)},
    ):
        save_file(spoiled, path)
        with pytest.raises(WeightsError, match=FILE_NAME):
            load(tmp_path / "model", Ledger(MANY), tmp_path)


def test_what_can_never_be_generated_is_refused_at_once() -> None:
    executor = open_executor()
    with torch.inference_mode():
        costs = GenerationCosts.of(executor.recipe)

    def cost(**fields: Any) -> Any:
        return measure(executor, costs, image_request(**fields), max_pixels=128 * 128)

    plain = cost()
    assert (plain.num_tokens, plain.num_pixels) == (16, 64 * 64)
    assert cost(width=128).num_tokens == 2 * plain.num_tokens
    assert cost(cache=StepCache(name="magcache")).state_bytes > plain.state_bytes
    for fields, param in (
        ({"width": 60}, "size"),
        ({"width": 512}, "size"),
        ({"mask": b"1"}, "mask"),
        ({"strength": 0.5}, "strength"),
        ({"adapters": (AdapterUse("none", 1.0),)}, None),
    ):
        with pytest.raises(InvalidRequest) as caught:
            cost(**fields)
        assert param is None or caught.value.param == param


@pytest.mark.parametrize(
    "name", ["off", "planned", "taylorseer", "teacache", "first-block", "magcache"]
)
def test_an_image_takes_no_more_than_it_was_measured_at(name: str) -> None:
    driver = RunnerDriver(open_executor())
    with torch.inference_mode():
        costs = GenerationCosts.of(driver.executor.recipe)
    request = image_request(num_steps=9, cache=StepCache(name=name))  # type: ignore[arg-type]
    cost = measure(driver.executor, costs, request, max_pixels=128 * 128)
    (key,) = driver.encode(request)
    driver.denoise([key], num_steps=8)
    pools = driver.executor.pools._pools.values()
    held = sum(pool.num_used * pool._cells[0].nbytes for pool in pools)
    held += driver.executor._prompts._cache.num_bytes
    assert 0 < held <= cost.state_bytes
    method = driver.executor.cache_of(request)
    assert method is None or method.level in (Level.SPAN, Level.VELOCITY)


class _Mixed:
    """Latents that are a mixture of the mean colours they stand for, and a little more."""

    mixture = torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, -0.5], [0.3, 0.0, 2.0], [1.0, 1.0, 1.0]])
    vae = SimpleNamespace(config={"block_out_channels": (4, 4)})
    device = torch.device("cpu")

    def image_sample(self, image_3HW: Tensor, generator: None) -> Tensor:
        return torch.einsum("cr,rhw->chw", self.mixture, avg_pool2d(image_3HW, 2)) - 0.4

    def to_latents(self, sample: Tensor, request: Any) -> Tensor:
        return sample


def test_a_fitted_map_finds_the_colours() -> None:
    recipe = _Mixed()
    preview = Preview.fit(cast("Recipe", recipe))
    colours = torch.rand((3, 8, 8), generator=torch.Generator().manual_seed(5))
    generated = preview.colours(recipe.image_sample(colours, None))
    assert float((generated - avg_pool2d(colours, 2)).abs().max()) < 0.05
