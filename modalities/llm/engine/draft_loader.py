"""Loads the smaller model that drafts for a language model.

Owns the order of its parts, and the check that both models have one vocabulary. Its policy is
`schedulers.tokens.draft_model`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from triptych.core.engine_api.resolved_model import ResolvedModel
from triptych.core.errors import ConfigError
from triptych.core.kv.pages import PagePool
from triptych.core.options.config import Config, ModelOptions
from triptych.core.runtime.decoders.families.table import is_native
from triptych.core.runtime.decoders.native import Blueprint, NativeBlueprint
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.engine.draft_runner import DraftingRunner
from triptych.core.runtime.engine.model_memory import ModelMemory
from triptych.core.runtime.engine.text_head import TextHead
from triptych.core.runtime.engine.token_runner import TokenRunner
from triptych.core.runtime.layers.attention import KvCache, KvLayout
from triptych.core.runtime.sampling.sampler import Sampler
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.grouped import open_checkpoint
from triptych.core.text.shared_vocabulary import num_different_tokens
from triptych.schedulers.tokens.draft_model import MAX_TOKENS, DraftModel, DraftShape

_log = logging.getLogger(__name__)

_AS_STORED = ModelOptions().quantization_encoding
_CACHE_SHARE = 0.1
"""Of the memory that is left, for the pages of the drafting model."""
_USUAL_TOKENS = 2048
"""A prompt with its answer: the start says if these have no drafts."""


class DraftLoader:
    """The drafting model of a text model. First `reserve`, then `join`.

    `open_memory` opens the memory of a model with a configuration.
    """

    def __init__(
        self,
        resolved: ResolvedModel,
        config: Config,
        device: Device,
        open_memory: Callable[[ResolvedModel, Config], ModelMemory],
    ) -> None:
        self._config = config
        self._device = device.torch
        self._name, self._folder = resolved.name, Path(resolved.draft)
        check_vocabulary(Path(resolved.folder), self._folder, self._name)
        models = replace(config.models, quantization_encoding=_AS_STORED, max_length=0)
        self._memory = open_memory(
            structs.replace(resolved, folder=resolved.draft), replace(config, models=models)
        )
        self._native = self._memory.native_kernels()
        with open_checkpoint(self._folder) as checkpoint:
            self._blueprint = self._read(checkpoint)
        self._num_rows = config.schedule.max_batch_size
        self._layout: KvLayout
        self._num_pages = 0
        self._max_length = 0

    def _read(self, checkpoint: Checkpoint) -> NativeBlueprint:
        """The model before loading. Raises `ConfigError` for one that does not run here."""
        if not is_native(checkpoint.config):
            raise ConfigError(
                f"--draft-model-path: {self._folder.name} does not run on the native decoder; name"
                " a model of its families."
            )
        blueprint = NativeBlueprint(
            checkpoint.config,
            max_length=0,
            dtype=self._memory.dtype(checkpoint.dtype, takes_blocks=True),
            device=self._device,
            native=self._native,
            encoding=self._memory.encoding(checkpoint),
        )
        blueprint.is_deterministic = self._config.device.enable_deterministic_inference
        return blueprint

    def reserve(self, target: Blueprint, page_size: int) -> DraftModel:
        """Reserve memory for weights, steps and pages of `page_size`; returns the policy.

        Raises `ConfigError` for a model that cannot take back tokens.
        """
        blueprint, memory, num_rows = self._blueprint, self._memory, self._num_rows
        _, page_type = memory.cache_format(blueprint.dtype)
        self._layout = blueprint.kv_layout(page_size, page_type)
        if self._layout.states:
            raise ConfigError(
                f"--draft-model-path: the states of {self._folder.name}'s recurrent layers cannot"
                " go back to before a wrong draft; name another model."
            )
        memory.reserve("draft-weights", blueprint.weight_bytes())
        num_bytes = blueprint.activation_bytes(MAX_TOKENS + num_rows, num_rows)
        memory.reserve("draft-activations", num_bytes)
        self._max_length = min(blueprint.max_length, target.max_length)
        pages_per_row = -(-self._max_length // page_size)
        room = int(_CACHE_SHARE * memory.available_bytes) // self._layout.page_bytes
        # Rows without a page are not drafted, so the other model's context comes first.
        self._num_pages = max(1, min(room, pages_per_row * num_rows))
        memory.reserve("draft-kv", (self._num_pages + 1) * self._layout.page_bytes)
        self._warn_of_few_pages(page_size)
        pool = PagePool(
            num_pages=self._num_pages,
            page_size=page_size,
            enable_prefix_caching=self._config.cache.enable_prefix_caching,
        )
        return DraftModel(pool, self._shape(target))

    def _warn_of_few_pages(self, page_size: int) -> None:
        """Say where usual prompts have no drafts for lack of pages."""
        num_tokens = self._num_pages * page_size
        if num_tokens < min(_USUAL_TOKENS, self._max_length):
            _log.warning(
                "%s: %s drafts for texts of up to %d tokens only, of all requests together: its"
                " pages have a tenth of the memory that is left; raise --device-memory-utilization",
                *(self._name, self._folder.name, num_tokens),
            )

    def _shape(self, target: Blueprint) -> DraftShape:
        return DraftShape(
            vocab_size=self._blueprint.vocab_size,
            target_vocab_size=target.vocab_size,
            max_length=self._max_length,
            relative_size=self._blueprint.weight_bytes() / target.weight_bytes(),
            max_drafts=self._config.speculation.num_speculative_tokens,
        )

    def join(self, target: TokenRunner) -> DraftingRunner:
        """Load the weights; returns the runner of both models."""
        with open_checkpoint(self._folder) as checkpoint:
            checkpoint.native = self._native
            decoder = self._blueprint.build(checkpoint, lambda share: None)
        sampler = Sampler(
            vocab_size=self._blueprint.vocab_size,
            max_batch_size=self._num_rows,
            device=self._device,
            native=self._native,
        )
        draft = TokenRunner(
            TextHead(decoder, sampler, max_batch_size=self._num_rows, device=self._device),
            KvCache(self._layout, self._num_pages, self._device, self._native),
            max_batch_size=self._num_rows,
            max_length=self._max_length,
            device=self._device,
        )
        draft.is_deterministic = target.is_deterministic
        return DraftingRunner(target, draft)


def check_vocabulary(folder: Path, draft: Path, name: str) -> None:
    """Raise `ConfigError` where a token of both models is another text. One may have more."""
    if num_different := num_different_tokens(folder, draft, name):
        raise ConfigError(
            f"--draft-model-path: {draft.name} and {name} differ in {num_different} tokens; name a"
            " model with the same vocabulary."
        )
