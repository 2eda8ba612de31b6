"""Brings one language model onto the device: memory, weights, cache, runner, scheduler.

Owns the order of these and how much cache a model gets. Knows no architecture: blueprints do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from triptych.core.config import Config
from triptych.core.device import Device
from triptych.core.errors import MemoryBudgetExceeded
from triptych.core.kernels.native.library import NativeKernels
from triptych.core.kv.pages import PagePool
from triptych.core.layers.attention import KvCache, KvLayout
from triptych.core.ledger import Ledger
from triptych.core.sampling.sampler import Sampler
from triptych.core.text_head import TextHead
from triptych.core.token_runner import TokenRunner
from triptych.core.weights.cache import WeightsCache
from triptych.core.weights.checkpoint import Checkpoint
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.models.blueprint import Blueprint
from triptych.modalities.llm.models.families import is_native
from triptych.modalities.llm.models.native import NativeBlueprint
from triptych.schedulers.base import LoadedModel
from triptych.schedulers.token import TokenScheduler

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_CPU_CACHE_SHARE = 0.25  # of the ledger: a laptop has other things to do with its memory


class LlmLoader:
    """Implements `schedulers.base.ModelLoader`."""

    def __init__(
        self, resolved: ResolvedModel, config: Config, device: Device, ledger: Ledger
    ) -> None:
        self.name = resolved.name
        self._resolved = resolved
        self._config = config
        self._device = device
        self._ledger = ledger

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        """Load the model; see `schedulers.base.ModelLoader.load`. On an error nothing is held."""
        with Checkpoint.open(self._resolved.folder) as checkpoint, ExitStack() as stack:
            dtype = self._dtype(checkpoint)
            native = self._native_kernels()
            blueprint = self._blueprint(checkpoint, dtype, native)
            self._reserve(stack, "weights", blueprint.weight_bytes())
            self._reserve(stack, "activations", self._activation_bytes(blueprint))
            layout = blueprint.kv_layout(*self._cache_format(dtype))
            num_pages = self._num_pages(blueprint, layout)
            self._reserve(stack, "kv", (num_pages + 1) * layout.page_bytes)
            model = blueprint.build(checkpoint, report)
            max_batch_size, device = self._config.schedule.max_batch_size, self._device.torch
            sampler = self._sampler(blueprint, native)
            runner = TokenRunner(
                TextHead(model, sampler, max_batch_size=max_batch_size, device=device),
                KvCache(layout, num_pages, device, native),
                max_batch_size=max_batch_size,
                max_length=blueprint.max_length,
                device=device,
            )
            stack.callback(runner.close)
            scheduler = self._scheduler(blueprint, layout, num_pages)
            close = stack.pop_all().close
        return LoadedModel(name=self.name, scheduler=scheduler, runner=runner, close=close)

    def _dtype(self, checkpoint: Checkpoint) -> torch.dtype:
        wanted = self._config.models.dtype
        return _DTYPES.get(wanted) or self._device.compute_dtype(checkpoint.dtype)

    def _cache_format(self, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        options = self._config.cache
        return options.kv_cache_page_size, _DTYPES.get(options.kv_cache_format, dtype)

    def _blueprint(
        self, checkpoint: Checkpoint, dtype: torch.dtype, native: NativeKernels | None
    ) -> Blueprint:
        wanted, config = self._config.models.model_impl, checkpoint.config
        max_length, device = self._config.models.max_length, self._device.torch
        if wanted == "transformers" or (wanted == "auto" and not is_native(config)):
            from triptych.modalities.llm.models.fallback import FallbackBlueprint

            return FallbackBlueprint(config, max_length=max_length, dtype=dtype, device=device)
        return NativeBlueprint(
            config, max_length=max_length, dtype=dtype, device=device, native=native
        )

    def _reserve(self, stack: ExitStack, purpose: str, num_bytes: int) -> None:
        stack.enter_context(self._ledger.reserve(f"{self.name}/{purpose}", num_bytes)).commit()

    def _activation_bytes(self, blueprint: Blueprint) -> int:
        options = self._config.schedule
        num_rows = options.max_batch_size
        return blueprint.activation_bytes(options.max_batch_input_tokens + num_rows, num_rows)

    def _num_pages(self, blueprint: Blueprint, layout: KvLayout) -> int:
        """As many pages as full batches can use, the budget allows, and other models leave.

        One row of the whole context must fit, whatever the shares say.
        """
        pages_per_row = -(-blueprint.max_length // layout.page_size)
        room = self._ledger.available_bytes // layout.page_bytes - 1
        if room < pages_per_row:
            raise MemoryBudgetExceeded(
                f"The cache of {self.name} has room for {max(room, 0) * layout.page_size} tokens,"
                f" less than its context of {blueprint.max_length}: lower --max-length, or raise"
                " --device-memory-utilization."
            )
        share = room // max(1, len(self._config.models.model))
        if self._config.cache.kv_cache_memory_mb:
            share = self._config.cache.kv_cache_memory_mb * 2**20 // layout.page_bytes
        elif self._device.is_cpu:
            cpu_bytes = int(self._ledger.capacity_bytes * _CPU_CACHE_SHARE)
            share = min(share, cpu_bytes // layout.page_bytes)
        most = pages_per_row * self._config.schedule.max_batch_size
        return max(pages_per_row, min(share, room, most))

    def _native_kernels(self) -> NativeKernels | None:
        if not self._device.is_cpu:
            return None
        folder = WeightsCache.open(self._config.models.cache_dir).models.with_name("kernels")
        return NativeKernels.open(self._config.device.cpu_kernels, folder)

    def _sampler(self, blueprint: Blueprint, native: NativeKernels | None) -> Sampler:
        return Sampler(
            vocab_size=blueprint.vocab_size,
            max_batch_size=self._config.schedule.max_batch_size,
            device=self._device.torch,
            native=native,
        )

    def _scheduler(self, blueprint: Blueprint, layout: KvLayout, num_pages: int) -> TokenScheduler:
        """Cached prompts are found again only by the same weights in the same cache format."""
        pool = PagePool(
            num_pages=num_pages,
            page_size=layout.page_size,
            enable_prefix_caching=self._config.cache.enable_prefix_caching,
        )
        identity = f"{self._resolved.digest} {layout} {blueprint.max_length}"
        return TokenScheduler(
            model=self.name,
            pool=pool,
            options=self._config.schedule,
            max_length=blueprint.max_length,
            namespace=identity.encode(),
        )
