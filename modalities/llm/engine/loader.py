"""Brings one language model onto the device: memory, weights, cache, runner, scheduler.

Owns the order of these. Knows no architecture: blueprints do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from triptych.core.decoders.families import is_native
from triptych.core.decoders.native import Blueprint, NativeBlueprint
from triptych.core.engine.loader import TokenLoader
from triptych.core.engine.model_memory import ModelMemory
from triptych.core.engine.text_head import TextHead
from triptych.core.grammar.vocabulary import GrammarVocabulary
from triptych.core.kernels.native.library import NativeKernels
from triptych.core.layers.attention import KvLayout
from triptych.core.lazy import load
from triptych.core.plan import Runner
from triptych.core.weights.tensors.checkpoint import Checkpoint
from triptych.core.weights.tensors.grouped import open_checkpoint
from triptych.schedulers.base import LoadedModel
from triptych.schedulers.guides import Guides
from triptych.schedulers.token import TokenScheduler

_FALLBACK = "triptych.modalities.llm.engine.fallback:FallbackBlueprint"


class LlmLoader(TokenLoader):
    """Implements `schedulers.base.ModelLoader`."""

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        """Load the model; see `schedulers.base.ModelLoader.load`. On an error nothing is held."""
        with open_checkpoint(self._resolved.folder) as checkpoint, ExitStack() as stack:
            memory = self._memory(stack)
            config, native = checkpoint.config, memory.native_kernels()
            kind = self._kind(NativeBlueprint, _FALLBACK, native, is_known=is_native(config))
            is_ours = kind is NativeBlueprint
            sizes = self._sizes(memory, checkpoint, native, takes_blocks=is_ours)
            dtype = sizes["dtype"]
            blueprint: Blueprint = kind(config, **sizes)
            memory.reserve("weights", blueprint.weight_bytes())
            num_rows = self._config.schedule.max_batch_size
            num_tokens = self._config.schedule.max_batch_input_tokens + num_rows
            memory.reserve("activations", blueprint.activation_bytes(num_tokens, num_rows))
            layout = blueprint.kv_layout(*memory.cache_format(dtype))
            max_length = blueprint.max_length
            graphs = self._graphs(memory, layout, max_length, blueprint.activation_bytes)
            num_pages = memory.reserve_pages(layout, max_length)
            memory.show()
            device = self._device.torch
            model = blueprint.build(checkpoint, report)
            sampler = self._sampler(blueprint.vocab_size, native)
            head = TextHead(model, sampler, max_batch_size=num_rows, device=device)
            runner = self._runner(
                head, layout, num_pages, max_length=max_length, native=native, graphs=graphs
            )
            stack.callback(runner.close)
            scheduler = TokenScheduler(**self._schedule(layout, num_pages, max_length))
            return self._loaded(scheduler, runner, blueprint.vocab_size, stack)

    def _loaded(
        self, scheduler: TokenScheduler, runner: Runner, vocab_size: int, stack: ExitStack
    ) -> LoadedModel:
        """The model, whose answers may have to follow grammars; `stack` releases it."""
        open_vocabulary = partial(GrammarVocabulary.open, self._folder, self.name, vocab_size)
        scheduler.guides = guides = Guides(open_vocabulary)
        scheduler.tokens.vocab_size = vocab_size
        stack.callback(guides.close)
        return LoadedModel(
            name=self.name,
            scheduler=scheduler,
            runner=runner,
            close=stack.pop_all().close,
            connect=scheduler.connect,
        )

    def _kind(
        self, ours: Any, fallback: str, native: NativeKernels | None, *, is_known: bool
    ) -> Any:
        """The blueprints to use: those of our decoder, or of transformers, at `fallback`."""
        wanted = self._config.models.model_impl
        is_ours = wanted == "native" or (wanted == "auto" and is_known)
        self._check_invariance(native, is_native=is_ours)
        return ours if is_ours else load(fallback)

    def _sizes(
        self,
        memory: ModelMemory,
        checkpoint: Checkpoint,
        native: NativeKernels | None,
        *,
        takes_blocks: bool,
    ) -> dict[str, Any]:
        """What every blueprint is opened with; one that takes blocks, with their encoding, too."""
        sizes = {
            "max_length": self._config.models.max_length,
            "dtype": memory.dtype(checkpoint.dtype, takes_blocks=takes_blocks),
            "device": self._device.torch,
            "native": native,
        }
        if not takes_blocks:
            return sizes
        return sizes | {"encoding": memory.encoding(checkpoint)}

    def _schedule(
        self, layout: KvLayout, num_pages: int, max_length: int, *, shares: bool = True
    ) -> dict[str, Any]:
        """What every scheduler of tokens is opened with."""
        return {
            "model": self.name,
            "pool": self._pool(layout, num_pages, shares=shares),
            "options": self._config.schedule,
            "max_length": max_length,
            "namespace": self._namespace(layout, max_length),
        }
