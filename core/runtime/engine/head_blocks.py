"""Blocks of a head that drafts all their tokens in one pass.

Owns the division of a step into cells that are followed, whose rows the target's steps stored, and
blocks, which attend to themselves as a whole. Implements
`core.runtime.engine.token_runner.TokenHead`.

A row brings the tokens that it follows; one that is sampled brings its block after them: the last
known token, and a mask for each draft (`core.runtime.engine.draft_runner`). A draft's cell is at
its own position. Each token of a block is a decode row of attention, whose context is the row's.

Shapes: T tokens of the step, F followed cells, N tokens of blocks, R drafts, C hidden, B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch

from triptych.core.engine_api.plan import TokenRow
from triptych.core.engine_api.tokens import TokenDelta
from triptych.core.runtime.decoders.heads.protocol import BlockHead
from triptych.core.runtime.engine.text_head import TokenSampler, TokenSamples
from triptych.core.runtime.engine.token_runner import RowResults, StepLayout, TokenRunner
from triptych.core.runtime.kernels.paged_attention import AttentionBatch, Int64s
from triptych.core.runtime.layers.attention import KvCache, PagedStep


class HeadBlocks:
    """Drives a `BlockHead` with a `Sampler`; `target` runs the model that it drafts for."""

    def __init__(self, head: BlockHead, sampler: TokenSampler, target: TokenRunner) -> None:
        rows_NPW = target.kv.hidden
        assert rows_NPW is not None, "the target stores rows"
        self._head, self._sampler, self._target = head, sampler, target
        self._rows_NW = rows_NPW.flatten(0, 1)

    def bind(self, row: TokenRow) -> None:
        """Bind the slot's sampling state."""
        self._sampler.bind(row)

    def lay_out(self, step: StepLayout) -> Sequence[Int64s]:
        """The tokens' ids, the followed cells and their rows' places, and the blocks' tokens."""
        in_block_T = np.zeros(len(step.row_T), dtype=np.bool_)
        for row, first in zip(step.rows, step.row_starts, strict=True):
            end = first + row.num_tokens
            in_block_T[end - _block_size(row) : end] = True
        followed_F, blocks_N = np.flatnonzero(~in_block_T), np.flatnonzero(in_block_T)
        slots_F = step.slots_B[step.row_T[followed_F]]
        places_F = self._target.places(slots_F, step.host_positions_T[followed_F])
        return step.token_ids_T, followed_F, places_F, blocks_N, step.row_T[blocks_N]

    def forward(self, step: StepLayout, kv: KvCache) -> torch.Tensor:
        """Compute `hidden_TC`, zeros except in blocks."""
        token_ids_T, followed_F, places_F, blocks_N, rows_N = step.extras
        if len(followed_F):
            stored_FW = self._rows_NW.index_select(0, places_F)
            paged = PagedStep(kv, _part(step, followed_F))
            self._head.follow(stored_FW, step.positions_T.index_select(0, followed_F), paged)
        if not len(blocks_N):
            return self._rows_NW.new_zeros(len(token_ids_T), 1)
        paged = PagedStep(kv, _blocks(step, blocks_N, rows_N))
        ids_N, positions_N = (
            each.index_select(0, blocks_N) for each in (token_ids_T, step.positions_T)
        )
        hidden_NC = self._head.forward(ids_N, positions_N, paged)
        hidden_TC = hidden_NC.new_zeros(len(token_ids_T), hidden_NC.shape[1])
        return hidden_TC.index_copy_(0, blocks_N, hidden_NC)

    def sample(self, step: StepLayout, hidden_TC: torch.Tensor) -> RowResults:
        """The drafts of each sampled row."""
        places = [
            (row.slot, row.start + row.num_tokens - num_after)
            for row in step.rows
            for num_after in range(_block_size(row) - 1, 0, -1)
        ]
        if not places:
            return partial(_grouped, step.rows, None)
        logits_RV = self._head.logits(hidden_TC.index_select(0, step.sampled_index_R))
        slots, positions = zip(*places, strict=True)
        return partial(_grouped, step.rows, self._sampler.sample(logits_RV, slots, positions))


def _block_size(row: TokenRow) -> int:
    """The tokens of a row's block, of which all but the first are drafts; 0 for none."""
    return row.num_drafts + 2 if row.is_sampled else 0


def _part(step: StepLayout, index_F: torch.Tensor) -> AttentionBatch:
    """The batch of cells that are written only."""
    batch, num_tokens = step.batch, len(index_F)
    ones_F = np.ones(num_tokens, dtype=np.int64)
    return AttentionBatch(
        page_table_BM=batch.page_table_BM[:0],
        context_lengths_B=batch.context_lengths_B[:0],
        query_starts_B=batch.query_starts_B[:0],
        write_slots_T=batch.write_slots_T.index_select(0, index_F),
        num_decode_rows=0,
        host_query_lengths_B=ones_F[:0],
        host_context_lengths_B=ones_F[:0],
        native=batch.native,
    )


def _blocks(step: StepLayout, index_N: torch.Tensor, rows_N: torch.Tensor) -> AttentionBatch:
    """The batch of blocks: a decode row for each token, whose context is all of its row."""
    batch, num_tokens = step.batch, len(index_N)
    lengths = [row.start + row.num_tokens for row in step.rows for _ in range(_block_size(row))]
    return AttentionBatch(
        page_table_BM=batch.page_table_BM.index_select(0, rows_N),
        context_lengths_B=batch.context_lengths_B.index_select(0, rows_N),
        query_starts_B=torch.arange(num_tokens, device=index_N.device),
        write_slots_T=batch.write_slots_T.index_select(0, index_N),
        num_decode_rows=num_tokens,
        host_query_lengths_B=np.ones(num_tokens, dtype=np.int64),
        host_context_lengths_B=np.array(lengths, dtype=np.int64),
        native=batch.native,
        is_deterministic=batch.is_deterministic,
        backend=batch.backend,
    )


def _grouped(rows: Sequence[TokenRow], sampled: TokenSamples | None) -> tuple[TokenDelta, ...]:
    """One entry per row: its drafts, or none of them where one is not finite."""
    found = iter(sampled.to_results() if sampled is not None else ())
    results = []
    for row in rows:
        drafts = [next(found) for _ in range(_block_size(row) - 1)]
        is_finite = all(each.is_finite for each in drafts)
        token_ids = chain.from_iterable(each.token_ids for each in drafts if is_finite)
        results.append(TokenDelta(token_ids=tuple(token_ids)))
    return tuple(results)
