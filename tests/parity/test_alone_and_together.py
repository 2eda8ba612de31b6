"""An image is bit for bit the same alone and beside others, on a CPU, in the types users get."""

from __future__ import annotations

import pytest
import torch

from support.image_runner import image_request
from support.kernel_levels import cache_with_kernels
from support.tiers import first, nightly
from triptych.core.bundle.resolve import resolve_all
from triptych.core.options.config import Config
from triptych.core.options.table import make_config
from triptych.core.runtime.devices.device import open_device
from triptych.core.weights.progress import SilentProgress
from triptych.modalities.diffusion.engine.executor import ImageExecutor, RunningImage
from triptych.modalities.diffusion.engine.loader import DiffusionLoader
from triptych.modalities.diffusion.source import EMBEDDED_IMAGES
from triptych.modalities.diffusion.wire import ImageRequest, StepCache

CACHES = ("off", "planned", "teacache", "first-block", "taylorseer", "magcache")
PROMPTS = ("a red apple", "two green frogs")
NUM_STEPS = 14  # the fewest that plans are calibrated for


@pytest.fixture(scope="module", params=first(["auto", "float32"]))
def executor(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ImageExecutor:
    folder = cache_with_kernels(tmp_path_factory.mktemp("cache"))
    options = {"model": (EMBEDDED_IMAGES.name,), "device": "cpu", "cache_dir": str(folder)}
    config: Config = make_config({**options, "dtype": request.param})
    (resolved,) = resolve_all(config.models, SilentProgress(), sources=(EMBEDDED_IMAGES,))
    loaded = DiffusionLoader(resolved, config, *open_device(config.device)).load(lambda done: None)
    executor = loaded.runner._executor  # type: ignore[attr-defined]
    assert isinstance(executor, ImageExecutor)
    return executor


def asked(index: int, cache: str, guidance_scale: float, side: int) -> ImageRequest:
    return image_request(
        prompt=PROMPTS[index],
        seed=index,
        width=side,
        height=side,
        num_steps=NUM_STEPS,
        guidance_scale=guidance_scale,
        cache=StepCache(name=cache),  # type: ignore[arg-type]
    )


@torch.inference_mode()
def generate(
    executor: ImageExecutor, *requests: ImageRequest
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Latents and bytes of each, generated together."""
    begun = executor.begin([(request, 0) for request in requests])
    images = [image for image in begun if isinstance(image, RunningImage)]
    for _ in range(NUM_STEPS):
        executor.advance(images, [1] * len(images), [False] * len(images))
    latents = [image.row.sample.sample.clone() for image in images]
    shown = [pixels.get().clone() for pixels, _ in executor.decode(images)]
    for image in images:
        image.release()
    return list(zip(latents, shown, strict=True))


@pytest.mark.parametrize(
    ("cache", "guidance_scale", "side"),
    [*((cache, 3.5, 64) for cache in CACHES), ("off", 1.0, 128), nightly("first-block", 1.0, 128)],
)
def test_an_image_alone_equals_itself_in_a_batch(
    executor: ImageExecutor, cache: str, guidance_scale: float, side: int
) -> None:
    requests = [asked(index, cache, guidance_scale, side) for index in range(len(PROMPTS))]
    together = generate(executor, *requests)
    executor._prompts._cache.clear()  # so that texts are encoded again, alone
    for request, (latents, shown) in zip(requests, together, strict=True):
        ((latents_alone, shown_alone),) = generate(executor, request)
        assert torch.equal(latents, latents_alone)
        assert torch.equal(shown, shown_alone)
