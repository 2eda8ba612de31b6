"""Whole images whose batch mates use other adapters, with step caches and without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from support.image_runner import RunnerDriver, image_request, open_executor
from support.lora_files import layers, pair
from triptych.core.engine_api.pixels import Pixels
from triptych.core.errors import InvalidRequest
from triptych.modalities.diffusion.engine.adapters.files import LowRank
from triptych.modalities.diffusion.wire import AdapterUse, ImageRequest, StepCache

PIPELINE = "PixArtSigmaPipeline"
INK, SOFT = AdapterUse("ink", 9.0), AdapterUse("soft", -7.0)


def adapt(parts: dict[str, Any]) -> dict[str, list[LowRank]]:
    """Two adapters, of the denoiser; the first is of the text encoder, too."""
    generator = torch.Generator().manual_seed(3)
    chosen = {
        "ink": [("transformer", "to_q"), ("transformer", "net.2"), ("text_encoder", ".q")],
        "soft": [("transformer", "to_out.0")],
    }
    return {
        name: [
            LowRank(part, path, *pair(parts[part].get_submodule(path), 3, generator))
            for part, end in ends
            for path in layers(parts[part], end)
        ]
        for name, ends in chosen.items()
    }


@pytest.fixture(scope="module")
def driver() -> RunnerDriver:
    return RunnerDriver(open_executor(PIPELINE, adapt=adapt))


def requests(cache: str) -> list[ImageRequest]:
    uses: list[tuple[AdapterUse, ...]] = [(), (INK,), (SOFT, INK), (AdapterUse("ink", -4.0),)]
    return [
        image_request(seed=5, adapters=adapters, cache=StepCache(name=cache)) for adapters in uses
    ]


def apart(one: Pixels, other: Pixels) -> int:
    """The most that one colour of one pixel differs by, of 255."""
    values = [np.frombuffer(image.rgb, np.uint8).astype(int) for image in (one, other)]
    return int(np.abs(values[0] - values[1]).max())


@pytest.mark.parametrize("cache", ["off", "first-block", "planned"])
def test_an_image_alone_is_the_image_among_others(cache: str, driver: RunnerDriver) -> None:
    together = driver.finish(driver.encode(*requests(cache)))
    for mixed, request in zip(together, requests(cache), strict=True):
        (alone,) = driver.finish(driver.encode(request, first=50))
        assert apart(mixed, alone) <= 1
    assert min(apart(together[0], other) for other in together[1:]) > 5


def test_an_unknown_adapter_is_refused_before_anything_is_generated(driver: RunnerDriver) -> None:
    with pytest.raises(InvalidRequest, match="no adapter 'oil'; adapters: ink, soft"):
        driver.executor.cache_of(image_request(adapters=(AdapterUse("oil"),)))
