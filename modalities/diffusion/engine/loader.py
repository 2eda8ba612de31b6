"""Loads one image model onto the device: components, memory, executor, runner, scheduler.

Owns their order; `room.py` divides the memory among them. Knows no HTTP and no policy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from triptych.core.errors import ConfigError, InvalidRequest
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config
from triptych.core.runtime.devices.device import Device, share_cores
from triptych.core.runtime.engine.loader import DeviceLoader
from triptych.core.runtime.engine.model_memory import FEWER_BITS, ModelMemory
from triptych.core.runtime.layers.native_linear import pack_linears
from triptych.core.weights.layout import read_json
from triptych.core.weights.manifest import verify_if_sealed
from triptych.core.weights.pipeline_index import read_pipeline
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.diffusion.engine.adapters.adapters import Adapters, adapter_bytes
from triptych.modalities.diffusion.engine.adapters.store import ImageAdapterStore
from triptych.modalities.diffusion.engine.caches.choice import CacheResolver
from triptych.modalities.diffusion.engine.costs import GenerationCosts
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.executor import ImageExecutor
from triptych.modalities.diffusion.engine.families.span import SpanModel
from triptych.modalities.diffusion.engine.families.table import check_divisible, open_model
from triptych.modalities.diffusion.engine.latent_decoder import LatentDecoder, Preview
from triptych.modalities.diffusion.engine.loading.components import (
    WRITER,
    Components,
    component_bytes,
    open_components,
    outline_components,
)
from triptych.modalities.diffusion.engine.parallel.division import Division, follower_plan
from triptych.modalities.diffusion.engine.prompts import PromptCache
from triptych.modalities.diffusion.engine.recipes.recipe import Recipe
from triptych.modalities.diffusion.engine.recipes.registry import open_recipe
from triptych.modalities.diffusion.engine.room import Room
from triptych.modalities.diffusion.engine.runner import DenoiseRunner
from triptych.modalities.diffusion.plan import DenoisePlan, ImageCost
from triptych.modalities.diffusion.scheduling.adapters import AdapterJobs
from triptych.modalities.diffusion.scheduling.scheduler import DenoiseScheduler
from triptych.modalities.diffusion.wire import ImageRequest
from triptych.schedulers.base import LoadedModel
from triptych.schedulers.executors import Post
from triptych.schedulers.health import crash

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup
    from triptych.core.runtime.engine.ranks import Plans, Ranks

_PROMPTS_BYTES = 64 * 2**20


class DiffusionLoader(DeviceLoader):
    """Implements `schedulers.base.ModelLoader`, and `core.runtime.engine.ranks.RankLoader`."""

    def __init__(
        self, resolved: ResolvedModel, config: Config, device: Device, ledger: Ledger
    ) -> None:
        super().__init__(resolved, config, device, ledger)
        self._num_ranks = config.device.num_image_ranks
        if self._num_ranks > 1 and device.is_cpu:
            share_cores(config.device, self._num_ranks)

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        """Load the model; see `schedulers.base.ModelLoader.load`. An error releases everything."""
        with ExitStack() as stack:
            memory = self._memory(stack)
            memory.num_ranks = self._num_ranks
            self._check_division(memory)
            costs, room = self._reserve(memory)
            ranks = self._ranks(self._num_ranks, stack) if self._num_ranks > 1 else None
            # Before the weights load: a rank that cannot load them is not waited for.
            division = Division() if ranks is None else ranks.divide(self._division)
            if ranks is not None:
                ranks.send_capacity(room.whole_pixels)
            recipe, components = self._open(memory, report)
            costs = replace(costs, recipe=recipe)
            executor = self._executor(components, recipe, room, division)
            own = DenoiseRunner(executor, self._device.torch, is_divided=ranks is not None)
            stack.callback(own.close)
            runner = own if ranks is None else ranks.leading_runner(own, follower_plan)
            store = None if ranks else self._adapter_store(executor, components, memory, stack)
            close = stack.pop_all().close
        images = self._config.images
        scheduler = DenoiseScheduler(
            model=self.name,
            measure=lambda request: measure(
                executor, costs, request, max_pixels=images.max_image_pixels
            ),
            max_images=images.max_images_in_flight,
            max_state_bytes=room.state_bytes,
            max_jobs=self._config.schedule.max_queue_size + images.max_images_in_flight,
            max_rows=room.max_rows,
        )
        scheduler.splits_guidance = self._config.device.cfg_parallel_size == 1
        if store is not None:
            scheduler.adapters = AdapterJobs(store, scheduler.uses_adapter)
        return LoadedModel(
            name=self.name,
            scheduler=scheduler,
            runner=runner,
            close=close,
            connect=partial(_connect, scheduler, ranks),
        )

    def follow(self, plans: Plans, group: RankGroup, ready: Callable[[], None]) -> None:
        """Repeat the steps of rank 0 without decoding pixels; see `RankLoader`."""
        with ExitStack() as stack:
            memory, division = self._memory(stack), self._division(group)
            _, room = self._reserve(memory)
            recipe, components = self._open(memory, lambda share: None)
            # Every rank encodes source images, in tiles on all ranks or on none.
            room = replace(room, whole_pixels=plans.capacity(int))
            executor = self._executor(components, recipe, room, division)
            runner = DenoiseRunner(executor, self._device.torch, is_divided=True)
            ready()
            plans.run(runner.launch, DenoisePlan)

    def _adapter_store(
        self,
        executor: ImageExecutor,
        components: Components,
        memory: ModelMemory,
        stack: ExitStack,
    ) -> ImageAdapterStore:
        """The store that loads adapters while the model runs."""
        store = ImageAdapterStore(
            executor.adapters,
            components,
            self._config,
            dtype=partial(memory.dtype, takes_blocks=True),
            reserve=partial(self._ledger.reserve, f"{self.name}/adapters"),
        )
        stack.callback(store.close)
        return store

    def _check_division(self, memory: ModelMemory) -> None:
        """Raise `ConfigError` if the model cannot be divided as the options require."""
        if self._num_ranks == 1:
            return
        assert not memory.captures, "runs on several ranks are not captured"
        degree = self._config.device.ulysses_degree
        parts = read_pipeline(self._folder).parts
        if WRITER in parts:
            raise ConfigError(
                f"{self.name} is not divided over ranks: each would sample its own tokens of an"
                " image. Leave out --cfg-parallel-size and --ulysses-degree."
            )
        if degree > 1:
            part = parts.get("transformer") or parts["unet"]
            config = read_json(self._folder / part.name / "config.json")
            check_divisible(part.class_name, config, degree)

    def _division(self, group: RankGroup) -> Division:
        """This rank's part; all ranks must call it."""
        return Division.of(group, self._config.device.ulysses_degree)

    @torch.inference_mode()
    def _reserve(self, memory: ModelMemory) -> tuple[GenerationCosts, Room]:
        """Reserve all memory before weights are read; returns the costs and room of images.

        Raises `MemoryBudgetExceeded`.
        """
        folder, options = self._folder, self._config.models
        verify_if_sealed(folder)
        dtype = partial(memory.dtype, takes_blocks=True)
        device = self._device.torch
        for part, num_bytes in component_bytes(folder, options, dtype=dtype, device=device).items():
            memory.reserve(part, num_bytes, remedy=FEWER_BITS)
        if num_bytes := adapter_bytes(self._config, dtype=dtype):
            memory.reserve("adapters", num_bytes)
        memory.reserve("prompts", _PROMPTS_BYTES, remedy=FEWER_BITS)
        outlines = outline_components(folder, options, dtype=dtype)
        costs = GenerationCosts.of(open_recipe(outlines.pipeline, outlines.parts))
        room = Room.reserve(memory, costs, self._config, captures=self._num_ranks == 1)
        memory.show()
        return costs, room

    def _open(
        self, memory: ModelMemory, report: Callable[[float], None]
    ) -> tuple[Recipe, Components]:
        native = memory.native_kernels()
        components = open_components(
            self._folder,
            self._config.models,
            device=self._device.torch,
            dtype=partial(memory.dtype, takes_blocks=True),
            report=report,
            native=native,
        )
        for part in components.parts.values():
            if isinstance(part, nn.Module):
                pack_linears(part, native)
        return open_recipe(components.pipeline, components.parts), components

    @torch.inference_mode()
    def _executor(
        self, components: Components, recipe: Recipe, room: Room, division: Division
    ) -> ImageExecutor:
        folder = Path(self._resolved.folder)
        model = open_model(recipe.model, division.tokens)
        model.graphs = room.graphs
        adapters = model.adapters = Adapters.open(self._config, components)
        return ImageExecutor(
            recipe,
            Denoiser(model, division.branches),
            caches=CacheResolver.open(
                folder,
                type(recipe.model).__name__,
                can_probe=isinstance(model, SpanModel),
                config=self._config,
            ),
            prompts=PromptCache(recipe, adapters, self._resolved.digest, _PROMPTS_BYTES),
            adapters=adapters,
            decoder=LatentDecoder(recipe, Preview.open(folder, recipe), room.whole_pixels),
        )


def _connect(scheduler: DenoiseScheduler, ranks: Ranks | None, post: Post) -> None:
    """End the engine when a rank ends: `post` runs a call on the loop's thread."""
    if scheduler.adapters is not None:
        scheduler.adapters.connect(post)
    if ranks is not None:
        ranks.watch(lambda error: post(partial(crash, error)))


def measure(
    executor: ImageExecutor, costs: GenerationCosts, request: ImageRequest, *, max_pixels: int
) -> ImageCost:
    """The cost of an image of the request. Raises `RequestError` if it cannot be generated."""
    if request.width * request.height > max_pixels:
        raise InvalidRequest(
            f"An image may have at most {max_pixels} pixels, not {request.width}x{request.height}.",
            param="size",
        )
    return costs.of_image(request, executor.cache_of(request))
