"""An image through the real engine is the one diffusers' own pipeline generates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from support.diffusers_images import request_for, theirs
from support.diffusers_pipelines import SCHEDULERS
from support.image_folders import save_pipeline
from support.one_engine import answers
from support.tiers import first
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, DeviceOptions, ModelOptions
from triptych.core.runtime.devices.device import Device
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.diffusion.engine.latent_decoder import LatentDecoder
from triptych.modalities.diffusion.engine.loader import DiffusionLoader
from triptych.modalities.diffusion.wire import ImageDelta, ImageRequest, StepCache

pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*upcast_vae.*:FutureWarning"),
]
PIPELINES = sorted(name for name, found in SCHEDULERS.items() if len(found) >= 3)
ASKED = ImageRequest(
    prompt="A red apple", negative_prompt="blurry", width=64, height=96, num_steps=3, seed=11
)


def generate(
    folder: Path, cache_dir: Path, *requests: ImageRequest
) -> tuple[list[list[ImageDelta]], Ledger]:
    """Generate all requests at once; the deltas of each."""
    config = Config(
        models=ModelOptions(cache_dir=str(cache_dir), dtype="float32"),
        device=DeviceOptions(cpu_kernels="torch"),
    )
    resolved = ResolvedModel(name="m", reference=str(folder), folder=str(folder), digest="d")
    ledger = Ledger(2**31)
    loader = DiffusionLoader(resolved, config, Device(torch.device("cpu")), ledger)
    return answers(loader, config, ledger, requests), ledger


def image_of(deltas: Sequence[ImageDelta], index: int = 0) -> np.ndarray:
    finished = [delta for delta in deltas if delta.image == index and delta.partial_index < 0]
    (found,) = [delta.pixels for delta in finished if delta.pixels is not None]
    return np.frombuffer(found.rgb, np.uint8).reshape(found.height, found.width, 3)


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[Tensor, Tensor]]:
    """The latents that images end with, as the autoencoder and as the model has them, by seed."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    decode = LatentDecoder.decode

    def record(self: LatentDecoder, samples: Sequence[tuple[Tensor, ImageRequest]]) -> Any:
        for sample, request in samples:
            seen[request.seed] = self._recipe.to_latents(sample, request), sample
        return decode(self, samples)

    monkeypatch.setattr(LatentDecoder, "decode", record)
    return seen


@pytest.mark.parametrize("sampler", first(range(3)))
@pytest.mark.parametrize("name", PIPELINES)
def test_images_are_those_of_diffusers(
    name: str, sampler: int, tmp_path: Path, finished: dict[int, tuple[Tensor, Tensor]]
) -> None:
    """Batched with another prompt, seed and number of steps."""
    parts = save_pipeline(tmp_path, name)
    request = request_for(name, ASKED)
    other = ImageRequest(
        prompt="Two penguins", width=request.width, height=request.height, seed=5, num_steps=4
    )
    scheduler = SCHEDULERS[name][sampler]
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    deltas, _ = generate(tmp_path, tmp_path / "cache", other, request)
    components = {**parts, "scheduler": scheduler}
    expected = theirs(name, components, request, "latent")
    ours = finished[request.seed][expected.ndim == 2]
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
    shown = theirs(name, components, request, "pt").permute(1, 2, 0) * 255
    assert np.abs(image_of(deltas[1]) - shown.numpy()).max() <= 0.51
    assert deltas[1][-1].finish_reason == "stop"


CACHES = ("off", "taylorseer", "first-block", "teacache")


def test_an_image_is_the_same_alone_and_batched(
    tmp_path: Path, finished: dict[int, tuple[Tensor, Tensor]]
) -> None:
    """With every cache; the others differ in all there is, and ask for several images."""
    save_pipeline(tmp_path, "StableDiffusion3Pipeline")
    asked = [
        replace(ASKED, seed=20 + index, num_steps=12, cache=cache_of(name), has_progress=True)
        for index, name in enumerate(CACHES)
    ]
    others = [
        replace(ASKED, seed=30, width=96, prompt="Two penguins", num_images=2, num_partials=2),
        replace(ASKED, seed=31, num_steps=7, guidance_scale=1.0, sampler="euler"),
    ]
    alone = []
    for request in asked:
        (deltas,), _ = generate(tmp_path, tmp_path / "cache", request)
        alone.append((finished[request.seed][1], counts_of(deltas)))
    together, _ = generate(tmp_path, tmp_path / "cache", *others, *asked)
    for request, deltas, (expected, counts) in zip(asked, together[2:], alone, strict=True):
        assert counts_of(deltas) == counts
        apart = (finished[request.seed][1] - expected).abs().max()
        assert apart <= 1e-5 * expected.abs().max()
    computed = [max(counts.values()) for _, counts in alone]
    assert computed[0] == 12
    assert all(count < 12 for count in computed[1:])
    assert not np.array_equal(image_of(together[0], 0), image_of(together[0], 1))
    shown = [delta.partial_index for delta in together[0] if delta.partial_index >= 0]
    assert sorted(shown) == [0, 0, 1, 1]


def cache_of(name: str) -> StepCache:
    """Settings that skip on random weights."""
    return StepCache(
        name=name,  # type: ignore[arg-type]
        threshold=None if name in ("off", "taylorseer") else 0.3,
        coefficients=(1.0, 0.0) if name == "teacache" else (),
    )


def counts_of(deltas: Sequence[ImageDelta]) -> dict[int, int]:
    """Steps that ran the model, by steps done."""
    return {delta.step: delta.num_computed for delta in deltas if delta.step}
