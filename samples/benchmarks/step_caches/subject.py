"""The model whose images are measured, drawn by the engine's own parts in one process.

Owns loading and drawing. Everything is float32, so that only the cache makes a difference. Knows no
method and no measure.

Legend: B images, C channels, H height, W width.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from triptych.core.options.config import Config
from triptych.core.runtime.devices.device import open_device
from triptych.core.runtime.engine.model_memory import open_kernels
from triptych.core.runtime.layers.native_linear import pack_linears
from triptych.modalities.diffusion.engine.caches.methods import CacheMethod
from triptych.modalities.diffusion.engine.calibration.file import model_digest
from triptych.modalities.diffusion.engine.denoise import Denoiser, DenoiseRow
from triptych.modalities.diffusion.engine.families.span import SpanModel
from triptych.modalities.diffusion.engine.families.table import open_model
from triptych.modalities.diffusion.engine.loading.components import open_components
from triptych.modalities.diffusion.engine.recipes.registry import open_recipe
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools
from triptych.modalities.diffusion.wire import ImageRequest


@dataclass(frozen=True, slots=True)
class Wish:
    """An image: its prompt, its seed, and what a judge should see in it."""

    prompt: str
    seed: int
    shows: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How images are drawn: with a second guidance branch, or without."""

    num_steps: int
    is_guided: bool

    @property
    def name(self) -> str:
        """Short and unique."""
        return f"{self.num_steps} {'guided' if self.is_guided else 'unguided'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Images in 0..1, the runs of the model for a branch of each, and all their processor time.

    Processor time is that of the steps, without text encoder and autoencoder.
    """

    images_BCHW: Tensor
    num_runs: list[float]
    cpu_s: float

    def joined(self, other: Drawn) -> Drawn:
        """Both, this one's first."""
        return Drawn(
            images_BCHW=torch.cat([self.images_BCHW, other.images_BCHW]),
            num_runs=self.num_runs + other.num_runs,
            cpu_s=self.cpu_s + other.cpu_s,
        )


class Subject:
    """A model from a folder in the hub's layout, and its guidance scale where it is guided."""

    def __init__(self, folder: Path, *, guidance: float | None, batch_size: int) -> None:
        config = Config()
        device, _ = open_device(config.device)
        native = open_kernels(config) if device.is_cpu else None
        components = open_components(
            folder,
            config.models,
            device=device.torch,
            dtype=lambda *_: torch.float32,
            report=lambda _: None,
            native=native,
        )
        for part in components.parts.values():
            if isinstance(part, nn.Module):
                pack_linears(part, native)
        self.digest = model_digest(folder, config.models)
        self.recipe = open_recipe(components.pipeline, components.parts)
        self.denoiser = Denoiser(open_model(self.recipe.model))
        self.pools = TensorPools()
        self._guidance = self.recipe.spec.default_guidance if guidance is None else guidance
        self._batch_size = batch_size

    @property
    def can_probe(self) -> bool:
        """Whether a cache may look between the blocks."""
        return isinstance(self.denoiser.model, SpanModel)

    @torch.inference_mode()
    def draw(
        self, wishes: Sequence[Wish], sampling: Sampling, method: CacheMethod | None = None
    ) -> Drawn:
        """The images of all wishes, in their order."""
        parts = [self._draw(part, sampling, method) for part in self.batches(wishes)]
        drawn = parts[0]
        for part in parts[1:]:
            drawn = drawn.joined(part)
        return drawn

    def batches(self, wishes: Sequence[Wish]) -> list[Sequence[Wish]]:
        """The wishes that are drawn together."""
        size = self._batch_size
        return [wishes[first : first + size] for first in range(0, len(wishes), size)]

    def rows(
        self,
        stack: ExitStack,
        wishes: Sequence[Wish],
        sampling: Sampling,
        cache: CacheMethod | None,
    ) -> list[DenoiseRow]:
        """Rows at their first step, which `stack` releases."""
        rows = []
        for wish in wishes:
            row = self.recipe.prepare(self._request(wish, sampling), self.pools, cache=cache)
            stack.callback(row.release)
            rows.append(row)
        return rows

    def _draw(
        self, wishes: Sequence[Wish], sampling: Sampling, method: CacheMethod | None
    ) -> Drawn:
        with ExitStack() as stack:
            rows = self.rows(stack, wishes, sampling, method)
            started_s = time.process_time()
            while not rows[0].is_done:
                self.denoiser.step(rows)
            cpu_s = time.process_time() - started_s
            images = [
                self.recipe.decode(row.sample.sample, self._request(wish, sampling)).clamp(0, 1)
                for row, wish in zip(rows, wishes, strict=True)
            ]
            runs = [sum(b.num_runs for b in row.branches) / len(row.branches) for row in rows]
            return Drawn(images_BCHW=torch.stack(images).cpu(), num_runs=runs, cpu_s=cpu_s)

    def _request(self, wish: Wish, sampling: Sampling) -> ImageRequest:
        width, height = self.recipe.default_size
        neutral = self.recipe.spec.neutral_guidance
        return ImageRequest(
            prompt=wish.prompt,
            seed=wish.seed,
            width=width,
            height=height,
            num_steps=sampling.num_steps,
            guidance_scale=self._guidance if sampling.is_guided else neutral,
        )
