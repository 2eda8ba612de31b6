"""The choice of the keys that tokens attend to, by the scores of an index (sparse attention).

Owns the operation, its torch reference, and attention over what it chose. Knows no projection: the
keys of the index are cached rows, its queries and the weights of its heads arrive.

A key's score is the sum, over the index's heads, of a weight times the positive part of the product
of query and key. A token attends to the keys of the highest scores; of equal scores, to the earlier
ones. Chosen keys keep the order of their positions, so that a token that sees no more keys than are
chosen attends as it would without an index, bit by bit on a CPU.

DeepSeek Sparse Attention: DeepSeek-V3.2, arXiv:2512.02556, section 2.1.

Shapes: T tokens, B rows, M pages per row, N pages of storage, P tokens per page, H heads of the
index, D their values, S keys of a row, C chosen keys, Q queries of a row, V values of a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from triptych.core.runtime.kernels.kv_pages import LatentPages, read_cells
from triptych.core.runtime.kernels.latent_attention import latent_attention
from triptych.core.runtime.kernels.paged_attention import AttentionBatch, AttentionRule, Int64s

MAX_SCORES = 2**24
"""The most scores that are held at a time, 64 MiB, and the most values that torch gathers."""


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """How many keys a token attends to, and the positive factor of all products."""

    num_chosen: int
    scale: float

    def is_needed(self, batch: AttentionBatch) -> bool:
        """Whether a token may see more keys than are chosen: fixed for a captured step.

        On a GPU whose results may not depend on other rows, every step chooses.
        """
        if batch.page_table_BM.is_cuda and batch.is_deterministic:
            return True
        return int(batch.host_context_lengths_B.max()) > self.num_chosen


def choose_keys(
    q_THD: torch.Tensor,
    weights_TH: torch.Tensor,
    pages: LatentPages,
    batch: AttentionBatch,
    rule: ChoiceRule,
) -> AttentionBatch:
    """The keys of each token, which is a row of its own: its page table has single slots.

    The index's keys of this step must be written to `pages`; weights are float32. See
    `attend_chosen`.
    """
    pages.check()
    assert q_THD.shape[2] == pages.k_NPKD.shape[3]
    assert weights_TH.shape == q_THD.shape[:2]
    assert weights_TH.dtype is torch.float32
    assert batch.blocks_2T is None, "an index is causal"
    given = q_THD, weights_TH, pages, batch, rule
    if batch.native is not None:
        slots_TC, lengths_T = batch.native.choose_keys(*given)
    else:
        slots_TC, lengths_T = (_on_gpu if q_THD.is_cuda else reference)(*given)
    num_tokens = len(q_THD)
    return AttentionBatch(
        page_table_BM=slots_TC,
        context_lengths_B=lengths_T,
        query_starts_B=torch.arange(num_tokens, device=q_THD.device),
        write_slots_T=batch.write_slots_T,
        num_decode_rows=num_tokens,
        host_query_lengths_B=np.ones(num_tokens, dtype=np.int64),
        host_context_lengths_B=np.minimum(_host_seen(batch), rule.num_chosen),
        native=batch.native,
        is_deterministic=batch.is_deterministic,
    )


def attend_chosen(
    q_THD: torch.Tensor, pages: LatentPages, chosen: AttentionBatch, rule: AttentionRule
) -> torch.Tensor:
    """Attention of every token over its chosen keys: `latent_attention` of rows of one token."""
    single = pages.single_rows()
    if chosen.native is not None or q_THD.is_cuda:
        return latent_attention(q_THD, single, chosen, rule)
    values_of_token = chosen.page_table_BM.shape[1] * q_THD.shape[2]
    return torch.cat(
        [
            latent_attention(q_THD[part], single, _some(chosen, part), rule)
            for part in _parts(len(q_THD), values_of_token)
        ]
    )


def reference(
    q_THD: torch.Tensor,
    weights_TH: torch.Tensor,
    pages: LatentPages,
    batch: AttentionBatch,
    rule: ChoiceRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of the chosen keys, `[T, C]`, and how many each token has, `[T]`."""
    seen_T = torch.from_numpy(_host_seen(batch)).to(q_THD.device)
    slots_TC = torch.zeros(len(q_THD), rule.num_chosen, dtype=torch.int64, device=q_THD.device)
    page_size, start = pages.k_NPKD.shape[1], 0
    lengths = zip(
        batch.host_query_lengths_B.tolist(), batch.host_context_lengths_B.tolist(), strict=True
    )
    for row, (num_queries, num_keys) in enumerate(lengths):
        position_S = torch.arange(num_keys, device=q_THD.device)
        slot_S = batch.page_table_BM[row, position_S // page_size] * page_size
        slot_S += position_S % page_size
        k_SD = read_cells(pages.k_NPKD, pages.k_scale_NPK, slot_S, torch.float32)[:, 0]
        for part in _parts(num_queries, num_keys * q_THD.shape[1]):
            tokens = slice(start + part.start, start + part.stop)
            scores_QS = _scores(q_THD[tokens], weights_TH[tokens], k_SD, rule.scale)
            scores_QS.masked_fill_(position_S >= seen_T[tokens, None], -torch.inf)
            highest_QC = scores_QS.sort(dim=1, descending=True, stable=True).indices
            kept_QC = highest_QC[:, : rule.num_chosen].sort(dim=1).values
            slots_TC[tokens, : kept_QC.shape[1]] = slot_S[kept_QC]
        start += num_queries
    return slots_TC, seen_T.clamp(max=rule.num_chosen)


def _scores(
    q_QHD: torch.Tensor, weights_QH: torch.Tensor, k_SD: torch.Tensor, scale: float
) -> torch.Tensor:
    """The scores of all keys, `[Q, S]`, float32."""
    products_QHS = (q_QHD.float() @ k_SD.t()).mul_(scale).relu_()
    return (weights_QH.unsqueeze(1) @ products_QHS).squeeze(1)


def _host_seen(batch: AttentionBatch) -> Int64s:
    """The keys that each token sees, itself included; upper limits in a captured step."""
    lengths_B, contexts_B = batch.host_query_lengths_B, batch.host_context_lengths_B
    first_B = contexts_B - lengths_B - (np.cumsum(lengths_B) - lengths_B)
    seen: Int64s = np.repeat(first_B, lengths_B) + np.arange(1, lengths_B.sum() + 1)
    return seen


def _parts(num: int, values_of_one: int) -> Iterator[slice]:
    """Parts of a range that hold no more than the most values, but at least one."""
    size = max(1, MAX_SCORES // values_of_one)
    for first in range(0, num, size):
        yield slice(first, min(first + size, num))


def _some(chosen: AttentionBatch, part: slice) -> AttentionBatch:
    """A part of the tokens of a choice."""
    size = part.stop - part.start
    return replace(
        chosen,
        page_table_BM=chosen.page_table_BM[part],
        context_lengths_B=chosen.context_lengths_B[part],
        query_starts_B=chosen.query_starts_B[:size],
        num_decode_rows=size,
        host_query_lengths_B=chosen.host_query_lengths_B[part],
        host_context_lengths_B=chosen.host_context_lengths_B[part],
        groups={},
    )


def _on_gpu(
    q_THD: torch.Tensor,
    weights_TH: torch.Tensor,
    pages: LatentPages,
    batch: AttentionBatch,
    rule: ChoiceRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score and choose with one kernel each, for some tokens at a time; no value is read back."""
    from triptych.core.runtime.kernels.triton.float8 import as_stored
    from triptych.core.runtime.kernels.triton.key_index import choose_slots, score_keys

    num_tokens, table_BM = len(q_THD), batch.page_table_BM
    token_T = torch.arange(num_tokens, device=q_THD.device)
    row_T = torch.searchsorted(batch.query_starts_B, token_T, right=True) - 1
    end_B = torch.cat((batch.query_starts_B[1:], token_T[-1:] + 1))
    seen_T = batch.context_lengths_B[row_T] - end_B[row_T] + token_T + 1
    slots_TC = torch.empty(num_tokens, rule.num_chosen, dtype=torch.int64, device=q_THD.device)
    page_size = pages.k_NPKD.shape[1]
    at_once = max(1, MAX_SCORES // (table_BM.shape[1] * page_size))
    for first in range(0, num_tokens, at_once):
        some = slice(first, first + at_once)
        places = table_BM, row_T[some], seen_T[some]
        cached = as_stored(pages.k_NPKD), pages.k_scale_NPK
        scores_TS = score_keys(
            q_THD[some], weights_TH[some], *cached, *places, rule.num_chosen, rule.scale
        )
        choose_slots(scores_TS, *places, slots_TC[some], page_size)
    return slots_TC, seen_T.clamp(max=rule.num_chosen)
