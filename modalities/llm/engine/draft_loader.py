"""Loads the drafting model of a language model: a smaller one, or a head that reads its states.

Owns the order of its parts, and their memory. Its policy is `schedulers.tokens.draft_model`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from msgspec import structs

from triptych.core.engine_api.plan import Runner
from triptych.core.engine_api.resolved_model import ResolvedModel
from triptych.core.kv.pages import PagePool
from triptych.core.options.config import Config, ModelOptions
from triptych.core.runtime.decoders.causal_model import CausalModel
from triptych.core.runtime.decoders.native import Blueprint
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.engine.draft_runner import DraftingRunner
from triptych.core.runtime.engine.model_memory import ModelMemory
from triptych.core.runtime.engine.token_runner import TokenHead, TokenRunner
from triptych.core.runtime.layers.attention import KvCache, KvLayout
from triptych.core.runtime.sampling.sampler import Sampler
from triptych.schedulers.tokens.draft_model import MAX_TOKENS, DraftModel, DraftShape
from triptych.schedulers.tokens.scheduler import TokenScheduler

_log = logging.getLogger(__name__)

_AS_STORED = ModelOptions().quantization_encoding
_CACHE_SHARE = 0.1
"""Of the memory that is left, for the pages of the drafting model."""
_USUAL_TOKENS = 2048
"""A prompt with its answer: the start says if these have no drafts."""


class DraftSizes(Protocol):
    """The sizes of a drafting model before it is loaded: of a smaller model, or of a head."""

    max_length: int
    vocab_size: int
    dtype: torch.dtype

    def weight_bytes(self) -> int:
        """Device bytes of its own weights once loaded."""

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most bytes that one of its steps holds in addition to weights and cache."""

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The shape of its own cache."""


class NoDraftLoader:
    """In the place of a `DraftLoader` where nothing drafts."""

    def layout_of(self, target: KvLayout) -> KvLayout:
        """The cache of the model as it is."""
        return target

    def reserve(self, target: Blueprint, page_size: int) -> None:
        """Reserve nothing, as nothing drafts."""

    def attach(self, target: CausalModel) -> None:
        """Load nothing, as nothing drafts."""

    def join(self, scheduler: TokenScheduler, target: TokenRunner) -> Runner:
        """Return the runner as it is."""
        return target


class DraftLoader:
    """The drafting model of a text model. First `reserve`, then `attach`, then `join`.

    `open_memory` opens the memory of a model with a configuration. `sizes` are set before
    `reserve`.
    """

    sizes: DraftSizes

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
        models = replace(config.models, quantization_encoding=_AS_STORED, max_length=0)
        self._memory = open_memory(
            structs.replace(resolved, folder=resolved.draft), replace(config, models=models)
        )
        self._native = self._memory.native_kernels()
        self._num_rows = config.schedule.max_batch_size
        self._layout: KvLayout
        self._drafter: DraftModel
        self._num_pages = 0
        self._max_length = 0

    def layout_of(self, target: KvLayout) -> KvLayout:
        """The cache of the other model, with the rows that the drafting one reads there."""
        return target

    def reserve(self, target: Blueprint, page_size: int) -> None:
        """Reserve memory for weights, steps and pages of `page_size`.

        Raises `ConfigError` for a model that cannot draft.
        """
        sizes, memory, num_rows = self.sizes, self._memory, self._num_rows
        _, page_type = memory.cache_format(sizes.dtype)
        self._layout = sizes.kv_layout(page_size, page_type)
        self._check(self._layout)
        memory.reserve("draft-weights", sizes.weight_bytes())
        memory.reserve("draft-activations", self._activation_bytes())
        self._max_length = min(sizes.max_length, target.max_length)
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
        self._drafter = DraftModel(pool, self._shape(target))

    def _check(self, layout: KvLayout) -> None:
        """Raise `ConfigError` for cells that cannot take back tokens."""

    def _activation_bytes(self) -> int:
        return self.sizes.activation_bytes(MAX_TOKENS + self._num_rows, self._num_rows)

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
            vocab_size=self.sizes.vocab_size,
            target_vocab_size=target.vocab_size,
            max_length=self._max_length,
            relative_size=self.sizes.weight_bytes() / target.weight_bytes(),
            max_drafts=self._config.speculation.num_speculative_tokens,
        )

    def attach(self, target: CausalModel) -> None:
        """Load the weights, for the loaded model that it drafts for; before that one's steps."""
        raise NotImplementedError

    def join(self, scheduler: TokenScheduler, target: TokenRunner) -> DraftingRunner:
        """Let `scheduler` draft. Returns the runner of both models; `target` runs the other one."""
        scheduler.draft_with(self._drafter)
        draft = TokenRunner(
            self._head(target),
            KvCache(self._layout, self._num_pages, self._device, self._native),
            max_batch_size=self._num_rows,
            max_length=self._max_length,
            device=self._device,
        )
        draft.is_deterministic = target.is_deterministic
        draft.stream = target.stream  # it reads what the other model's steps wrote
        return DraftingRunner(target, draft)

    def _head(self, target: TokenRunner) -> TokenHead:
        """The drafting model's view of a token."""
        raise NotImplementedError

    def _sampler(self, num_logits: int) -> Sampler:
        return Sampler(
            vocab_size=num_logits,
            max_batch_size=self._num_rows,
            device=self._device,
            native=self._native,
        )
