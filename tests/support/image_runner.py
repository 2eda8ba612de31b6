"""An executor over a tiny pipeline of diffusers with random weights, and plans for its runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import nn

from support.diffusers_pipelines import SCHEDULERS, components
from triptych.core.engine_api.pixels import Pixels
from triptych.core.engine_api.plan import Runner, StepResult
from triptych.modalities.diffusion.engine.adapters.adapters import Adapters
from triptych.modalities.diffusion.engine.adapters.files import LowRank
from triptych.modalities.diffusion.engine.caches.methods import (
    CacheMethod,
    Level,
    first_block,
    magcache,
    planned,
    taylorseer,
    teacache,
)
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.executor import ImageExecutor
from triptych.modalities.diffusion.engine.families.table import open_model
from triptych.modalities.diffusion.engine.latent_decoder import LatentDecoder, Preview
from triptych.modalities.diffusion.engine.parallel.division import Division
from triptych.modalities.diffusion.engine.prompts import PromptCache
from triptych.modalities.diffusion.engine.recipes.registry import open_recipe
from triptych.modalities.diffusion.engine.runner import DenoiseRunner
from triptych.modalities.diffusion.plan import (
    DenoisePlan,
    ImageKey,
    ImageRow,
    ImageRowResult,
    ImageStart,
    PlannedSteps,
)
from triptych.modalities.diffusion.wire import ImageRequest, StepCache

PIPELINE = "PixArtSigmaPipeline"
CPU = torch.device("cpu")
PROMPTS_BYTES = 2**20
WHOLE = Division()


class TinyCaches:
    """Every method at settings that skip on random weights; plans compute every third step."""

    def method(self, choice: StepCache, num_steps: int, sampler: str = "") -> CacheMethod | None:
        return {
            "auto": lambda: None,
            "off": lambda: None,
            "planned": lambda: planned([step % 3 == 0 for step in range(num_steps)]),
            "teacache": lambda: teacache("any", threshold=0.3, coefficients=(1.0, 0.0)),
            "first-block": lambda: first_block(threshold=0.3),
            "taylorseer": lambda: taylorseer(interval=3, warmup=2),
            "magcache": lambda: magcache((1.0, 0.99, 1.01), retention=0.1, level=Level.SPAN),
        }[choice.name]()


def open_executor(
    pipeline: str = PIPELINE,
    scheduler: int = 0,
    adapt: Callable[[dict[str, Any]], dict[str, list[LowRank]]] = lambda parts: {},
    device: torch.device = CPU,
    division: Division = WHOLE,
) -> ImageExecutor:
    """`adapt` makes adapters for the parts it is shown."""
    parts = {**components(pipeline), "scheduler": SCHEDULERS[pipeline][scheduler]}
    for name, part in parts.items():
        parts[name] = part.to(device) if isinstance(part, nn.Module) else part
    recipe = open_recipe(pipeline, parts)
    with torch.inference_mode():
        preview = Preview.fit(recipe)
    model = open_model(recipe.model, division.tokens)
    adapters = model.adapters = Adapters(parts, adapt(parts), max_in_run=4)
    return ImageExecutor(
        recipe,
        Denoiser(model, division.branches),
        caches=TinyCaches(),
        prompts=PromptCache(recipe, adapters, "tiny", PROMPTS_BYTES),
        adapters=adapters,
        decoder=LatentDecoder(recipe, preview, whole_pixels=2**20),
    )


def image_request(**fields: Any) -> ImageRequest:
    given = {"prompt": "A red apple", "width": 64, "height": 64, "seed": 7, "num_steps": 6}
    return ImageRequest(**{**given, **fields})


class RunnerDriver:
    """Drives a runner by hand, one image per key."""

    def __init__(self, executor: ImageExecutor, runner: Runner | None = None) -> None:
        self.executor = executor
        self.runner: Any = runner or DenoiseRunner(executor, executor.recipe.device)
        self.planned_steps: dict[ImageKey, PlannedSteps] = {}
        self._ids = count()

    def run(self, kind: str, **fields: Any) -> tuple[ImageRowResult, ...]:
        plan = DenoisePlan(step_id=next(self._ids), model="m", kind=kind, **fields)
        result = self.runner.launch(plan).result()
        assert isinstance(result, StepResult)
        return result.rows

    def encode(self, *requests: ImageRequest, first: int = 0) -> list[ImageKey]:
        """Begin the first image of each request; its job is named by the place in the call."""
        keys = [ImageKey(f"job{index}", 0) for index in range(first, first + len(requests))]
        starts = [ImageStart(key=k, request=r) for k, r in zip(keys, requests, strict=True)]
        for key, row in zip(keys, self.run("encode", starts=tuple(starts)), strict=True):
            assert row.error is None
            assert row.planned is not None
            self.planned_steps[key] = row.planned
        return keys

    def denoise(
        self, keys: Sequence[ImageKey], num_steps: int = 1, **fields: Any
    ) -> tuple[ImageRowResult, ...]:
        rows = tuple(ImageRow(key=key, num_steps=num_steps, **fields) for key in keys)
        return self.run("denoise", rows=rows)

    def finish(self, keys: Sequence[ImageKey], done: int = 0) -> list[Pixels]:
        """Denoise step by step to the ends, and decode."""
        last = max(self.planned_steps[key].num_steps for key in keys)
        for step in range(done, last):
            going = [key for key in keys if step < self.planned_steps[key].num_steps]
            for row in self.denoise(going):
                assert row.error is None
        return self.decode(keys)

    def decode(self, keys: Sequence[ImageKey]) -> list[Pixels]:
        rows = self.run("decode", rows=tuple(ImageRow(key=key) for key in keys))
        pixels = [row.pixels for row in rows if row.pixels is not None]
        assert len(pixels) == len(keys)
        return pixels
