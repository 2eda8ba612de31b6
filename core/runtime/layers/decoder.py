"""The decoder: one config-driven stack for every family of decoder-only language models.

Owns the layers and their order. Reads no configuration file and no checkpoint: families translate
their files into `DecoderConfig` and fill the parameters through views.

Shapes: T tokens, R rows of logits, C hidden, V vocabulary, F MLP features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.adapters import AdapterRows, VocabularyAdapters
from triptych.core.runtime.layers.altup import Streams
from triptych.core.runtime.layers.altup_layer import AltUpLayer
from triptych.core.runtime.layers.attention import PagedStep, StepPositions
from triptych.core.runtime.layers.decoder_layer import (
    DecoderConfig,
    DecoderLayer,
    LateInputs,
    new_norm,
)
from triptych.core.runtime.layers.hidden_rows import HiddenRows, TakenStates
from triptych.core.runtime.layers.host_layers import HostLayers
from triptych.core.runtime.layers.layer_inputs import LayerInputs
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.native_layers import NativeLayers, StackEnds, can_fuse
from triptych.core.runtime.layers.parallel import vocab_parallel
from triptych.core.runtime.layers.rotary import Rotary
from triptych.core.runtime.layers.shards import Shard

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup


class DecoderStack:
    """Layers and final norm: from embedded positions to hidden states.

    Parameters are allocated uninitialized: fill them, then call `prepare` once. With a `group` this
    is one rank's part, which runs together with the other ranks' parts.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        make_layer = DecoderLayer if config.altup is None else AltUpLayer
        self.layers = [
            make_layer(config, layer=layer, dtype=dtype, device=device, group=group)
            for layer in range(len(config.attention))
        ]
        self.norm = new_norm(config, dtype=dtype, device=device)
        self.layer_inputs: LayerInputs | None = None
        if config.layer_inputs is not None:
            self.layer_inputs = LayerInputs(config.layer_inputs, dtype=dtype, device=device)
        self.streams: Streams | None = None
        if config.altup is not None:
            self.streams = Streams(config.altup, dtype=dtype, device=device)
        self._rotary = Rotary(config.rope, device)
        local = config.local_rope
        self._local_rotary = None if local is None else Rotary(local, device)
        self._is_divided = group is not None
        self._fused: NativeLayers | None = None
        self.adapter_rows: AdapterRows | None = None
        """The rows' adapters, if its projections take any; set before `prepare`."""
        self.hidden_rows: HiddenRows | None = None
        """The rows that its steps keep for a head, if there is one; set before the first step."""
        self.host_layers: HostLayers | None = None
        """The last layers, if their weights stay in host memory; filled before `prepare`."""

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses, one at a time.

        With `native` kernels that support them, all layers run in one call.
        """
        num_here = len(self.layers) if self.host_layers is None else self.host_layers.first
        for layer in self.layers[:num_here]:
            layer.prepare(native)
        if self.host_layers is not None:
            self.host_layers.finish()
        self.norm.prepare()
        for part in (self.layer_inputs, self.streams):
            if part is not None:
                part.prepare(native)
        if native is not None and not self._is_divided and can_fuse(self.config, self.layers):
            ends = StackEnds(self.norm, self.layer_inputs, self.streams)
            self._fused = NativeLayers(self.config, self.layers, ends, native, self.adapter_rows)

    def linears(self) -> Iterator[Linear]:
        """Iterate over all projections."""
        for layer in self.layers:
            yield from layer.linears()
        for part in (self.layer_inputs, self.streams):
            if part is not None:
                yield from part.linears()

    def place(self, positions: torch.Tensor) -> StepPositions:
        """A step's positions as the layers use them."""
        full, local = self._rotary.rows(positions, self.dtype), self._local_rotary
        scaling = self.config.query_scaling
        return StepPositions(
            full,
            full if local is None else local.rows(positions, self.dtype),
            None if scaling is None else scaling.rows(positions),
        )

    def run(
        self,
        x_TC: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        late: LateInputs | None = None,
        rows_TLP: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the normalized last hidden state of every position; `x_TC` may be overwritten.

        `positions` are [T], or [3, T] (see `core.runtime.layers.rotary`). A model with layer inputs
        needs the tokens' rows of their table, which are overwritten.
        """
        places, kept = self.place(positions), self.hidden_rows
        taken = TakenStates() if kept is None else kept.begin()
        fused = self._fused if step.kv.native is not None else None
        run = self._run_layers if fused is None else fused
        hidden_TC = run(x_TC, places, step, late, rows_TLP, taken)
        if kept is not None:
            kept.store(taken, hidden_TC, step)
        return hidden_TC

    def _run_layers(
        self,
        x_TC: torch.Tensor,
        places: StepPositions,
        step: PagedStep,
        late: LateInputs | None,
        rows_TLP: torch.Tensor | None,
        taken: TakenStates,
    ) -> torch.Tensor:
        """As `run`, one layer after the other."""
        inputs: list[torch.Tensor | None] = [None] * len(self.layers)
        if self.layer_inputs is not None:
            assert rows_TLP is not None
            inputs = list(self.layer_inputs(x_TC, rows_TLP).unbind(1))
        pending_TC: torch.Tensor | None = None
        if self.streams is not None:
            x_TC = self.streams.open(x_TC)
        for index, layer in enumerate(self.layers):
            taken.take(index, x_TC, pending_TC)
            with self._weights_of(index):
                x_TC, pending_TC = layer(x_TC, pending_TC, places, step, inputs[index])
            if late is not None and index < len(late.values_LFC):
                x_TC = x_TC.index_add(0, late.index_F, late.values_LFC[index])
        if self.streams is not None:
            x_TC = self.streams.close(x_TC)
        taken.take(len(self.layers), x_TC, pending_TC)
        return self.norm.of_sum(x_TC, pending_TC)[0]

    def _weights_of(self, index: int) -> AbstractContextManager[None]:
        """A block in which the weights of a layer are on the device."""
        return nullcontext() if self.host_layers is None else self.host_layers.using(index)


class Decoder(DecoderStack):
    """Embedding, layers, final norm, and the projection onto the vocabulary."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
    ) -> None:
        super().__init__(config, dtype=dtype, device=device, group=group)
        self.vocabulary = config.vocabulary or Shard.whole(config.vocab_size)
        sizes = config.hidden_size, self.vocabulary
        new = partial(vocab_parallel, group, *sizes, dtype=dtype, device=device)
        self.head = new()
        self.embedding = self.head if config.has_tied_embeddings else new()
        self.vocabulary_adapters: VocabularyAdapters | None = None

    @property
    def vocab_size(self) -> int:
        """The number of logits."""
        return self.config.vocab_size

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Prepare the stack and the projection."""
        super().prepare(native)
        self.head.prepare(native, keeps_rows=self.embedding is self.head)

    def linears(self) -> Iterator[Linear]:
        """Iterate over all projections."""
        yield from super().linears()
        yield self.head

    def keep_own_rows(self) -> None:
        """Copy mapped tables, of which steps read rows; see `Linear.keep_own`."""
        self.embedding.keep_own()
        if self.layer_inputs is not None:
            self.layer_inputs.table.keep_own()

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Look up the input of the layers, `x_TC`."""
        x_TC = self.embedding.rows(token_ids_T)
        if self.vocabulary_adapters is not None:
            self.vocabulary_adapters.change_embedded(token_ids_T, x_TC)
        return self.scale_embedded(x_TC)

    def scale_embedded(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Scale rows of the embedding as the family does."""
        scale = self.config.embedding_scale
        return x_TC if scale == 1.0 else x_TC * torch.tensor(scale, dtype=x_TC.dtype)

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, step: PagedStep
    ) -> torch.Tensor:
        """Compute the normalized last hidden state of every token, `hidden_TC`."""
        inputs = self.layer_inputs
        rows_TLP = None if inputs is None else inputs.look_up(token_ids_T)
        return self.run(self.embed(token_ids_T), positions_T, step, rows_TLP=rows_TLP)

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """Score the whole vocabulary for each row: `logits_RV`, float32."""
        logits_RV = self.head(hidden_RC, out_dtype=torch.float32)
        if self.vocabulary_adapters is not None:
            self.vocabulary_adapters.change_logits(hidden_RC, logits_RV)
        return self.scale_logits(logits_RV)

    def scale_logits(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Scale and cap logits as the family does; may overwrite them."""
        if self.config.logit_scale != 1.0:
            logits_RV = logits_RV * self.config.logit_scale  # ranks share one number
        cap = self.config.logit_cap
        return logits_RV if cap is None else (logits_RV / cap).tanh_().mul_(cap)
