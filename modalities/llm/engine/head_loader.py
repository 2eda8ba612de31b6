"""Loads the head that drafts for a language model from its hidden states.

Owns what the head and its target share: the rows in the target's cache, and its vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath

import torch
from typing_extensions import override

from triptych.core.engine_api.resolved_model import ResolvedModel
from triptych.core.options.config import Config
from triptych.core.runtime.decoders.causal_model import CausalModel
from triptych.core.runtime.decoders.heads.protocol import AnyHead, BlockHead
from triptych.core.runtime.decoders.heads.table import HEADS
from triptych.core.runtime.decoders.native import Blueprint, NativeBlueprint
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.engine.draft_runner import DraftingRunner
from triptych.core.runtime.engine.head_blocks import HeadBlocks
from triptych.core.runtime.engine.head_tokens import HeadTokens
from triptych.core.runtime.engine.model_memory import ModelMemory
from triptych.core.runtime.engine.token_runner import TokenHead, TokenRunner
from triptych.core.runtime.layers.attention import KvLayout
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.hidden_rows import INPUTS, HiddenRows, HiddenShape
from triptych.core.runtime.tensors.grouped import open_checkpoint
from triptych.modalities.llm.engine.draft_loader import DraftLoader
from triptych.schedulers.tokens.draft_model import DraftShape
from triptych.schedulers.tokens.scheduler import TokenScheduler


class HeadLoader(DraftLoader):
    """A head for `target`, of the kind that the algorithm names."""

    def __init__(
        self,
        resolved: ResolvedModel,
        config: Config,
        device: Device,
        open_memory: Callable[[ResolvedModel, Config], ModelMemory],
        *,
        target: NativeBlueprint,
        sees_images: bool,
    ) -> None:
        super().__init__(resolved, config, device, open_memory)
        read = HEADS[config.speculation.speculative_algorithm]
        name = PurePath(config.speculation.draft_model_path).name or resolved.name
        with open_checkpoint(self._folder) as checkpoint:
            self._blueprint = self.sizes = read(checkpoint, target, self._native, name)
        reads_inputs = sees_images and not self._blueprint.block_size
        self._num_inputs = target.config.hidden_size if reads_inputs else 0
        self._loaded: AnyHead

    @override
    def layout_of(self, target: KvLayout) -> KvLayout:
        """The target's cache, with a row for each token.

        Where images fill tokens, it ends with the inputs of the target's layers.
        """
        size = self._blueprint.row_size + self._num_inputs
        return replace(target, hidden=HiddenShape(size, self._blueprint.dtype))

    @override
    def _activation_bytes(self) -> int:
        step_tokens = self._config.schedule.max_batch_input_tokens + self._num_rows
        inputs_bytes = 2 * self._num_inputs * self._blueprint.dtype.itemsize
        if inputs_bytes:  # and a copy of the row
            inputs_bytes += self._blueprint.row_size * self._blueprint.dtype.itemsize
        own_bytes = super()._activation_bytes() + self._blueprint.target_bytes(step_tokens)
        return own_bytes + step_tokens * inputs_bytes

    @override
    def _shape(self, target: Blueprint) -> DraftShape:
        shape = replace(super()._shape(target), reads_states=True)
        if not (block_size := self._blueprint.block_size):
            return shape
        most = min(shape.max_drafts, block_size - 1)
        return replace(shape, max_drafts=most, drafts_blocks=True)

    @override
    def attach(self, target: CausalModel) -> None:
        """Load the weights, and let the target's steps store its rows."""
        assert isinstance(target, Decoder), "heads read native decoders"
        with open_checkpoint(self._folder) as checkpoint:
            checkpoint.native = self._native
            self._loaded = self._blueprint.build(checkpoint, target, lambda share: None)
        layers, fuse = self._blueprint.hidden_layers, self._loaded.fuse
        if self._num_inputs:
            layers, fuse = (*layers, INPUTS), partial(_with_inputs, fuse)
        target.hidden_rows = HiddenRows(layers, fuse)

    @override
    def _head(self, target: TokenRunner) -> TokenHead:
        head, sampler = self._loaded, self._sampler(self._loaded.vocab_size)
        if isinstance(head, BlockHead):
            return HeadBlocks(head, sampler, target)
        return HeadTokens(head, sampler, target, max_batch_size=self._num_rows)

    @override
    def join(self, scheduler: TokenScheduler, target: TokenRunner) -> DraftingRunner:
        runner = super().join(scheduler, target)
        if isinstance(self._loaded, BlockHead):
            runner.mask_token_id = self._loaded.mask_token_id
        return runner


def _with_inputs(
    fuse: Callable[[Sequence[torch.Tensor]], torch.Tensor], states: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Rows of all states but the last, which are the inputs of the layers, and these after them."""
    *others, inputs_TC = states
    return torch.cat([fuse(others), inputs_TC], dim=1)
