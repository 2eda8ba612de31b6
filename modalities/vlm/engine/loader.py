"""Brings one vision model onto the device: memory, weights, caches, runner, scheduler.

Owns the order of these. Knows no architecture: the blueprint does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from triptych.core.engine.model_memory import ModelMemory
from triptych.core.weights.tensors.grouped import open_checkpoint
from triptych.modalities.llm.engine.loader import LlmLoader
from triptych.modalities.vlm.engine.blueprint import VisionBlueprint, is_native
from triptych.modalities.vlm.engine.encoder import FeatureCache, open_cache
from triptych.modalities.vlm.engine.fallback import FallbackVisionBlueprint
from triptych.modalities.vlm.engine.head import VisionHead
from triptych.modalities.vlm.engine.runner import VisionRunner
from triptych.modalities.vlm.scheduling import VisionLimits, VisionResources, VisionScheduler
from triptych.schedulers.base import LoadedModel

_STEP_PATCHES = 8192
"""Of pictures that are encoded together; a larger picture is encoded alone."""
_PICTURE_FEATURES = 1024
"""Of a picture as the cache expects them to be."""
_CACHE_SHARE = 0.1  # of the ledger, at most

Blueprint = VisionBlueprint | FallbackVisionBlueprint
_FALLBACK = "triptych.modalities.vlm.engine.fallback:FallbackVisionBlueprint"


class VisionLoader(LlmLoader):
    """Implements `schedulers.base.ModelLoader`."""

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        """Load the model; see `schedulers.base.ModelLoader.load`. On an error nothing is held."""
        with open_checkpoint(self._resolved.folder) as checkpoint, ExitStack() as stack:
            memory, device = self._memory(stack), self._device.torch
            native = memory.native_kernels()
            is_known = is_native(checkpoint.config)
            kind = self._kind(VisionBlueprint, _FALLBACK, native, is_known=is_known)
            takes_blocks = kind is VisionBlueprint
            sizes = self._sizes(memory, checkpoint, native, takes_blocks=takes_blocks)
            blueprint: Blueprint = kind(checkpoint, **sizes)
            family, max_length = blueprint.family, blueprint.text.max_length
            features = self._reserve(memory, blueprint)
            layout = blueprint.text.kv_layout(*memory.cache_format(blueprint.dtype))
            graphs = self._graphs(memory, layout, max_length, blueprint.text.activation_bytes)
            num_pages = memory.reserve_pages(layout, max_length)
            memory.show()
            decoder, encoder = blueprint.build(report)
            head = VisionHead(
                decoder,
                self._sampler(blueprint.text.vocab_size, native),
                features,
                blueprint.traits,
                max_batch_size=self._config.schedule.max_batch_size,
                device=device,
            )
            tokens = self._runner(
                head, layout, num_pages, max_length=max_length, native=native, graphs=graphs
            )
            runner = VisionRunner(tokens, encoder, features, device)
            stack.callback(runner.close)
            shares = not family.whole_prompts
            scheduler = VisionScheduler(
                **self._schedule(layout, num_pages, max_length, shares=shares),
                vision=VisionResources(
                    features,
                    VisionLimits(
                        max_step_patches=_STEP_PATCHES,
                        whole_spans=family.whole_spans,
                        whole_prompts=family.whole_prompts,
                    ),
                ),
            )
            return self._loaded(scheduler, runner, blueprint.text.vocab_size, stack)

    def _reserve(self, memory: ModelMemory, blueprint: Blueprint) -> FeatureCache:
        """All that does not depend on what else there is room for; returns the empty cache."""
        options, num_rows = self._config.schedule, self._config.schedule.max_batch_size
        num_tokens = options.max_batch_input_tokens + num_rows
        if blueprint.family.whole_prompts:
            num_tokens = max(num_tokens, blueprint.text.max_length + num_rows)
        memory.reserve("weights", blueprint.text.weight_bytes())
        memory.reserve("vision-weights", blueprint.encoder_bytes())
        activation_bytes = max(
            blueprint.text.activation_bytes(num_tokens, num_rows),
            blueprint.encoder_activation_bytes(2 * _STEP_PATCHES),
        )
        memory.reserve("activations", activation_bytes)
        max_entries = self._config.cache.max_vision_cache_entries
        wanted = max(max_entries * _PICTURE_FEATURES, _STEP_PATCHES) * blueprint.feature_bytes
        cache_bytes = min(wanted, int(_CACHE_SHARE * self._ledger.capacity_bytes))
        memory.reserve("vision-cache", cache_bytes)
        return open_cache(cache_bytes, max_entries)
