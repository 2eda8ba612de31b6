"""Brings one language model onto the device: memory, weights, cache, runner, scheduler.

Owns the order of these. Knows no architecture: blueprints do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from triptych.core.decoders.families import is_native
from triptych.core.decoders.native import Blueprint, NativeBlueprint
from triptych.core.engine.loader import TokenLoader
from triptych.core.engine.text_head import TextHead
from triptych.core.engine.token_runner import TokenRunner
from triptych.core.kernels.native.library import NativeKernels
from triptych.core.layers.attention import KvCache
from triptych.core.weights.tensors.checkpoint import Checkpoint
from triptych.schedulers.base import LoadedModel
from triptych.schedulers.token import TokenScheduler


class LlmLoader(TokenLoader):
    """Implements `schedulers.base.ModelLoader`."""

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        """Load the model; see `schedulers.base.ModelLoader.load`. On an error nothing is held."""
        with Checkpoint.open(self._resolved.folder) as checkpoint, ExitStack() as stack:
            memory = self._memory(stack)
            dtype = memory.dtype(checkpoint.dtype)
            native = memory.native_kernels()
            blueprint = self._blueprint(checkpoint, dtype, native)
            memory.reserve("weights", blueprint.weight_bytes())
            memory.reserve("activations", self._activation_bytes(blueprint))
            layout = blueprint.kv_layout(*memory.cache_format(dtype))
            num_pages = memory.reserve_pages(layout, blueprint.max_length)
            max_batch_size, device = self._config.schedule.max_batch_size, self._device.torch
            model = blueprint.build(checkpoint, report)
            sampler = self._sampler(blueprint.vocab_size, native)
            runner = TokenRunner(
                TextHead(model, sampler, max_batch_size=max_batch_size, device=device),
                KvCache(layout, num_pages, device, native),
                max_batch_size=max_batch_size,
                max_length=blueprint.max_length,
                device=device,
            )
            stack.callback(runner.close)
            scheduler = TokenScheduler(
                model=self.name,
                pool=self._pool(layout, num_pages),
                options=self._config.schedule,
                max_length=blueprint.max_length,
                namespace=self._namespace(layout, blueprint.max_length),
            )
            close = stack.pop_all().close
        return LoadedModel(name=self.name, scheduler=scheduler, runner=runner, close=close)

    def _blueprint(
        self, checkpoint: Checkpoint, dtype: torch.dtype, native: NativeKernels | None
    ) -> Blueprint:
        wanted, config = self._config.models.model_impl, checkpoint.config
        max_length, device = self._config.models.max_length, self._device.torch
        is_ours = wanted == "native" or (wanted == "auto" and is_native(config))
        self._check_invariance(native, is_native=is_ours)
        if not is_ours:
            from triptych.modalities.llm.engine.fallback import FallbackBlueprint

            return FallbackBlueprint(
                config, max_length=max_length, dtype=dtype, device=device, native=native
            )
        return NativeBlueprint(
            config, max_length=max_length, dtype=dtype, device=device, native=native
        )

    def _activation_bytes(self, blueprint: Blueprint) -> int:
        options = self._config.schedule
        num_rows = options.max_batch_size
        return blueprint.activation_bytes(options.max_batch_input_tokens + num_rows, num_rows)
