"""Loads the smaller model that drafts for a language model.

Owns the check that both models have one vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from typing_extensions import override

from triptych.core.engine_api.resolved_model import ResolvedModel
from triptych.core.errors import ConfigError
from triptych.core.options.config import Config
from triptych.core.runtime.decoders.causal_model import CausalModel
from triptych.core.runtime.decoders.families.table import is_native
from triptych.core.runtime.decoders.native import NativeBlueprint
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.engine.model_memory import ModelMemory
from triptych.core.runtime.engine.text_head import TextHead
from triptych.core.runtime.engine.token_runner import TokenHead, TokenRunner
from triptych.core.runtime.layers.attention import KvLayout
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.grouped import open_checkpoint
from triptych.core.text.shared_vocabulary import num_different_tokens
from triptych.modalities.llm.engine.draft_loader import DraftLoader


class SmallModelLoader(DraftLoader):
    """A whole model on the native decoder."""

    def __init__(
        self,
        resolved: ResolvedModel,
        config: Config,
        device: Device,
        open_memory: Callable[[ResolvedModel, Config], ModelMemory],
    ) -> None:
        super().__init__(resolved, config, device, open_memory)
        check_vocabulary(Path(resolved.folder), self._folder, self._name)
        with open_checkpoint(self._folder) as checkpoint:
            self._blueprint = self.sizes = self._read(checkpoint)
        self._decoder: Decoder

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
        blueprint.packing = self._memory.packing(self._native)
        return blueprint

    @override
    def _check(self, layout: KvLayout) -> None:
        if layout.states:
            raise ConfigError(
                f"--draft-model-path: the states of {self._folder.name}'s recurrent layers cannot"
                " go back to before a wrong draft; name another model."
            )

    @override
    def attach(self, target: CausalModel) -> None:
        """Load the weights."""
        with open_checkpoint(self._folder) as checkpoint:
            checkpoint.native = self._native
            self._decoder = self._blueprint.build(checkpoint, lambda share: None)

    @override
    def _head(self, target: TokenRunner) -> TokenHead:
        sampler = self._sampler(self._blueprint.vocab_size)
        return TextHead(self._decoder, sampler, max_batch_size=self._num_rows, device=self._device)


def check_vocabulary(folder: Path, draft: Path, name: str) -> None:
    """Raise `ConfigError` where a token of both models is another text. One may have more."""
    if num_different := num_different_tokens(folder, draft, name):
        raise ConfigError(
            f"--draft-model-path: {draft.name} and {name} differ in {num_different} tokens; name a"
            " model with the same vocabulary."
        )
