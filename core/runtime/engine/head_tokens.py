"""Tokens of a head that drafts: each is embedded together with a row of its target's states.

Owns the choice of rows, and of positions where the target has several axes. A pass that follows a
text reads rows where the target's steps stored them; a pass that goes on from a draft takes the
head's own hidden states, of which each slot's last are kept. Where images fill tokens, stored rows
end with the inputs of the target's layers, which stand for the embeddings of these tokens.
Implements `core.runtime.engine.token_runner.TokenHead`.

Shapes: T tokens of the step, D decode rows, F tokens that images fill, R rows of logits, C hidden,
W values of a row, S slots, A axes of positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from typing_extensions import override

from triptych.core.engine_api.frames import FIRST_FRAME_ID
from triptych.core.runtime.decoders.heads.protocol import ChainHead, FilledTokens
from triptych.core.runtime.engine.text_head import TextHead, TokenSampler
from triptych.core.runtime.engine.token_runner import RowResults, StepLayout, TokenRunner
from triptych.core.runtime.kernels.paged_attention import Int64s
from triptych.core.runtime.layers.attention import KvCache, PagedStep


class HeadTokens(TextHead):
    """Drives a `ChainHead` with a `Sampler`; `target` runs the model that it drafts for.

    Both have the same slots, and the target's page table holds the pages of every row here.
    """

    lag = 1

    def __init__(
        self, head: ChainHead, sampler: TokenSampler, target: TokenRunner, *, max_batch_size: int
    ) -> None:
        rows_NPX = target.kv.hidden
        assert rows_NPX is not None, "the target stores rows"
        assert isinstance(target.head, TextHead), "the target is a text model"
        device, size = rows_NPX.device, head.row_size
        self._with_rows = _WithRows(head)
        super().__init__(self._with_rows, sampler, max_batch_size=max_batch_size, device=device)
        self._target, self._target_head, self._has_axes = target, target.head, head.has_axes
        rows_NX = rows_NPX.flatten(0, 1)
        self._rows_NW, self._inputs_NC = rows_NX[:, :size], rows_NX[:, size:]
        self._own_rows_SW = torch.zeros(max_batch_size, size, dtype=rows_NPX.dtype, device=device)

    @override
    def lay_out(self, step: StepLayout) -> Sequence[Int64s]:
        """As a text's; positions, the places of rows, filled tokens and the places of inputs."""
        slots_T, positions_T = step.slots_B[step.row_T], step.host_positions_T
        followed = slice(step.num_decode, None)
        rows_T = self._target.places(slots_T[followed], positions_T[followed])
        filled_F = np.flatnonzero(step.token_ids_T >= FIRST_FRAME_ID)
        step.token_ids_T[filled_F] = 0
        inputs_F = self._target.places(slots_T[filled_F], positions_T[filled_F] + self.lag)
        places = self._target_head.places(step) if self._has_axes else positions_T
        return *super().lay_out(step), places, rows_T, filled_F, inputs_F

    @override
    def forward(self, step: StepLayout, kv: KvCache) -> torch.Tensor:
        """Compute `hidden_TC` from tokens and rows."""
        token_ids_T, places, rows_T, filled_F, inputs_F = step.extras
        own_DW = self._own_rows_SW.index_select(0, step.decode_slots_D)
        stored_TW = self._rows_NW.index_select(0, rows_T)
        self._with_rows.rows_TW, self._with_rows.filled = torch.cat([own_DW, stored_TW]), None
        if len(filled_F):
            inputs_FC = self._inputs_NC.index_select(0, inputs_F)
            self._with_rows.filled = FilledTokens(filled_F, inputs_FC)
        has_axes = len(places) > len(token_ids_T)
        step.positions_T = places.view(-1, len(token_ids_T)) if has_axes else places
        return super().forward(step, kv)

    @override
    def sample(self, step: StepLayout, hidden_TC: torch.Tensor) -> RowResults:
        """One token per sampled row; its hidden states are the next pass's row."""
        rows_RW = hidden_TC.index_select(0, step.sampled_index_R)
        self._own_rows_SW.index_copy_(0, step.sampled_slots_R, rows_RW)
        return super().sample(step, hidden_TC)


class _WithRows:
    """A head as a `CausalModel`, whose rows are chosen before each step."""

    def __init__(self, head: ChainHead) -> None:
        self._head = head
        self.rows_TW = torch.empty(0)
        self.filled: FilledTokens | None = None

    @property
    def vocab_size(self) -> int:
        """The number of logits."""
        return self._head.vocab_size

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, step: PagedStep
    ) -> torch.Tensor:
        """Compute `hidden_TC` of tokens and the chosen rows; positions may lie on axes."""
        return self._head.forward(token_ids_T, self.rows_TW, positions_T, step, self.filled)

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """Score the vocabulary: `logits_RV`."""
        return self._head.logits(hidden_RC)
