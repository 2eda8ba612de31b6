"""Steps of image models: each pipeline from prompt to pixels, with each step cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from support.denoiser_families import build, conditioning_of, sample_of
from support.diffusers_pipelines import SCHEDULERS
from support.dry_run import WatchedRunner
from support.fake_cuda import CUDA, FakeCuda
from support.image_runner import PIPELINE, RunnerDriver, image_request, open_executor
from support.tiers import among, first
from triptych.core.block_formats import FLOAT8_ROWS
from triptych.core.engine_api.pixels import Pixels
from triptych.core.runtime.kernels import library_products
from triptych.core.runtime.layers.block_layers import BlockDevice, block_places
from triptych.core.runtime.tensors.quantize import quantize_float8
from triptych.core.weights.encoding import WeightEncoding
from triptych.modalities.diffusion.engine.families.model import Batch
from triptych.modalities.diffusion.engine.families.table import open_model
from triptych.modalities.diffusion.engine.runner import DenoiseRunner
from triptych.modalities.diffusion.spec import spec_of
from triptych.modalities.diffusion.wire import CacheName, ImageRequest, StepCache

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")

GREY = Pixels(width=64, height=64, rgb=b"\x80" * (3 * 64 * 64))
LOOK_AT_VALUES = {"HiDreamImagePipeline", "HunyuanImagePipeline", "QwenImage21Pipeline"}
"""Pipelines whose model, in diffusers, counts tokens on the host: of each expert, of a mask."""

SAMPLE_ON_HOST = {"GlmImagePipeline"}
RUN = SCHEDULERS.keys() - LOOK_AT_VALUES - SAMPLE_ON_HOST

LIKE_OTHERS = {
    "Flux2KleinPipeline",
    "FluxKontextPipeline",
    "LongCatImagePipeline",
    "PixArtAlphaPipeline",
    "QwenImageEditPipeline",
    "QwenImageLayeredPipeline",
    "QwenImagePipeline",
    "SanaSprintPipeline",
    "StableDiffusionPipeline",
}
"""Pipelines with the transformer of another one."""


def is_ours(fault: str) -> bool:
    """Whether it is not in the forward of a library's model."""
    return "/diffusers/" not in fault and "/transformers/" not in fault


def generate_on(gpu: FakeCuda, **options: Any) -> RunnerDriver:
    """A tiny pipeline whose plans are steps on the device that is not there."""
    driver = RunnerDriver(open_executor(device=CUDA, **options))
    driver.runner = cast("DenoiseRunner", WatchedRunner(gpu, driver.runner))
    return driver


def asked(pipeline: str, **fields: Any) -> ImageRequest:
    spec = spec_of(pipeline)
    needs_image = spec.needs_reference or spec.needs_mask or pipeline == "FluxKontextPipeline"
    sources = (GREY,) if needs_image else ()
    mask = b"\xff" * (64 * 64) if spec.needs_mask else b""
    return image_request(num_steps=2, sources=sources, mask=mask, **fields)


@pytest.mark.parametrize("pipeline", among(sorted(RUN), RUN - LIKE_OTHERS))
def test_each_pipeline(gpu: FakeCuda, pipeline: str) -> None:
    """Two images, guided and not, with previews."""
    driver = generate_on(gpu, pipeline=pipeline)
    keys = driver.encode(asked(pipeline), asked(pipeline, guidance_scale=1.0, seed=8))
    driver.denoise(keys, has_preview=True)
    driver.denoise(keys)
    assert [image.width for image in driver.decode(keys)] == [64, 64]
    assert [fault for fault in gpu.faults if is_ours(fault)] == []


@pytest.mark.parametrize("pipeline", first(sorted(LOOK_AT_VALUES)))
def test_models_that_wait_whatever_we_do(gpu: FakeCuda, pipeline: str) -> None:
    driver = generate_on(gpu, pipeline=pipeline)
    keys = driver.encode(asked(pipeline))
    with pytest.raises(DynamicOutputShapeException):
        driver.denoise(keys)


@pytest.mark.parametrize("scheduler", first(range(len(SCHEDULERS[PIPELINE]))))
def test_each_sampler_of_ours(gpu: FakeCuda, scheduler: int) -> None:
    driver = generate_on(gpu, scheduler=scheduler)
    driver.finish(driver.encode(image_request(num_steps=4)))
    assert gpu.faults == []


CACHES = ("off", "planned", "teacache", "first-block", "taylorseer", "magcache")
LOOKS = {"teacache", "first-block"}
"""Methods whose decisions depend on what the model computes."""


@pytest.mark.parametrize("cache", CACHES)
def test_each_step_cache(gpu: FakeCuda, cache: CacheName) -> None:
    """One that looks waits once a step for all rows, to learn which compute; others never."""
    driver = generate_on(gpu)
    requests = [
        image_request(seed=int(guidance), guidance_scale=guidance, cache=StepCache(name=cache))
        for guidance in (1.0, 4.0)
    ]
    driver.finish(driver.encode(*requests))
    waits = [fault for fault in gpu.faults if "waits for an event" in fault]
    assert waits == gpu.faults
    assert ("relative_distances" in gpu.kernels) is (cache in LOOKS)
    assert len(waits) == (5 if cache in LOOKS else 0), "the first step has nothing to compare"


def test_an_image_that_is_edited(gpu: FakeCuda) -> None:
    driver = generate_on(gpu)
    mask = b"\xff" * (64 * 64)
    edits = [
        image_request(sources=(GREY,), strength=0.5),
        image_request(sources=(GREY,), strength=0.7, mask=mask),
    ]
    keys = driver.encode(*edits)
    for _ in range(2):
        driver.denoise(keys)
    driver.run("release", dropped=tuple(keys))
    assert gpu.faults == []


def test_float8_weights_of_flux(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch accepts what the fused blocks hand to its product, and activations are in float8."""
    monkeypatch.setattr(library_products, "MIN_ROWS", 1)
    name = "FluxTransformer2DModel"
    module = build(name).bfloat16()
    where = BlockDevice(device=CUDA, dtype=torch.bfloat16)
    places = block_places(module, WeightEncoding(FLOAT8_ROWS.name))
    module.to(CUDA)
    for place in places:
        place.put(quantize_float8(place.layer.weight), where)
    given = conditioning_of(name, 0)
    rows = {key: value.to(CUDA, torch.bfloat16) for key, value in given.rows.items()}
    shared = {key: value.to(CUDA) for key, value in given.shared.items()}
    batch = Batch(
        samples=sample_of(name, 0)[None].to(CUDA),
        times=torch.tensor([500.0]).to(CUDA),
        conditioning=[replace(given, rows=rows, shared=shared)],
    )
    velocity = open_model(module).velocity(batch)
    assert velocity.shape == batch.samples.shape
    fused = {"norm_rotary", "gated_modulated_norm", "quantize_gelu_rows", "quantize_rows"}
    assert fused <= gpu.kernels
    assert "fp8_linear" not in gpu.kernels
