"""Tokens of a head that drafts: each is embedded together with a row of its target's states.

Owns the choice of rows. A pass that follows a text reads them where the target's steps stored them;
a pass that goes on from a draft takes the head's own hidden states, of which each slot's last are
kept. Implements `core.runtime.engine.token_runner.TokenHead`.

Shapes: T tokens of the step, D decode rows, R rows of logits, C hidden, W values of a row, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from triptych.core.runtime.decoders.heads.protocol import ChainHead
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
        rows_NPW = target.kv.hidden
        assert rows_NPW is not None, "the target stores rows"
        device, size = rows_NPW.device, rows_NPW.shape[2]
        self._with_rows = _WithRows(head)
        super().__init__(self._with_rows, sampler, max_batch_size=max_batch_size, device=device)
        self._target, self._rows_NW = target, rows_NPW.flatten(0, 1)
        self._own_rows_SW = torch.zeros(max_batch_size, size, dtype=rows_NPW.dtype, device=device)

    @override
    def lay_out(self, step: StepLayout) -> Sequence[Int64s]:
        """As a text's, and the places of the rows of followed tokens."""
        followed = slice(step.num_decode, None)
        slots_T = step.slots_B[step.row_T[followed]]
        places_T = self._target.places(slots_T, step.host_positions_T[followed])
        return *super().lay_out(step), places_T

    @override
    def forward(self, step: StepLayout, kv: KvCache) -> torch.Tensor:
        """Compute `hidden_TC` from tokens and rows."""
        own_DW = self._own_rows_SW.index_select(0, step.decode_slots_D)
        stored_TW = self._rows_NW.index_select(0, step.extras[-1])
        self._with_rows.rows_TW = torch.cat([own_DW, stored_TW])
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

    @property
    def vocab_size(self) -> int:
        """The number of logits."""
        return self._head.vocab_size

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, step: PagedStep
    ) -> torch.Tensor:
        """Compute `hidden_TC` of tokens and the chosen rows."""
        return self._head.forward(token_ids_T, self.rows_TW, positions_T, step)

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """Score the vocabulary: `logits_RV`."""
        return self._head.logits(hidden_RC)
