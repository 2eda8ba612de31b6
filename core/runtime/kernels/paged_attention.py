"""Attention of a mixed batch over paged keys and values.

Owns the operation, its batch description and its torch reference. Knows nothing of models, slots or
page leases.

Shapes: T tokens of this step, B rows, M pages per row, N pages of storage, P tokens per page,
H query heads, K key-value heads, D head dim, S keys seen, Q queries per row, G rows of a group.

The last page of the storage is the *null page*: it is never leased, never written and stays zero.
Reading past the end of a row lands there, so a neighbour's stale NaN can never enter a row.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from triptych.core.runtime.devices.transfer import to_device
from triptych.core.runtime.kernels.attention_backends import FLASH, TRITON
from triptych.core.runtime.kernels.kv_pages import KvPages, LatentPages, read_cells, write_cells
from triptych.core.runtime.kernels.library_attention import (
    MAX_GATHERED_KEYS,
    PromptKeys,
    attend_prompts,
    find_prompt_keys,
)

if TYPE_CHECKING:
    from triptych.core.runtime.kernels.key_index import ChoiceRule

Int64s = npt.NDArray[np.int64]

_MIN_GROUP_KEYS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """The rule by which a layer's tokens weigh the keys that they see.

    `window` counts these keys, the token included; `None`: all. Where it is chunked, a token sees
    the keys from the last position on that is a multiple of the window. A score is `scale` times
    the product of query and key; a `soft_cap` limits it: `cap * tanh(score / cap)`. `sinks_H` are
    the scores of an additional key that every token sees and that has no value (Xiao et al. 2023,
    arXiv:2309.17453). The cache holds keys divided by `k_scale` and values divided by `v_scale`, in
    addition to the scales of cells.
    """

    scale: float
    window: int | None = None
    is_chunked: bool = False
    soft_cap: float | None = None
    sinks_H: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether the rule consists of scale and a sliding window only."""
        is_unscaled = self.k_scale == self.v_scale == 1.0 and not self.is_chunked
        return is_unscaled and self.soft_cap is None and self.sinks_H is None

    @property
    def span(self) -> int | None:
        """The window as kernels take it: negative where it is chunked."""
        return -self.window if self.is_chunked and self.window is not None else self.window


class CpuPagedKernels(Protocol):
    """CPU kernels with their own order of values in pages; see `kernels.native`."""

    def write_pages(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        pages: KvPages,
        batch: AttentionBatch,
    ) -> None:
        """Store keys and values: `write_pages` of this module."""
        ...

    def write_latents(
        self, rows_TD: torch.Tensor, pages: LatentPages, batch: AttentionBatch
    ) -> None:
        """Store rows: `kernels.latent_attention.write_latents`."""
        ...

    def choose_keys(
        self,
        q_THD: torch.Tensor,
        weights_TH: torch.Tensor,
        pages: LatentPages,
        batch: AttentionBatch,
        rule: ChoiceRule,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose keys: `kernels.key_index.reference`."""
        ...

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        pages: KvPages,
        batch: AttentionBatch,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Attend: `paged_attention` of this module, or `kernels.latent_attention`."""
        ...


@dataclass(slots=True, kw_only=True)
class AttentionBatch:
    """The assignment of a step's tokens to rows, and the places of the rows' keys.

    Rows lie one after the other in the token axis: `num_decode_rows` rows of one token first, then
    prompt chunks. All tensors are int64 on the device; the two host arrays repeat the lengths that
    shapes and launches depend on, so that nothing is ever read back. In a step that is captured on
    a GPU, `host_context_lengths_B` are upper limits.

    `blocks_2T`, if given, are the first and the last position of each token's block: within it, all
    tokens see each other. A block's last position is in the step. `context_lengths_B` counts the
    keys that a row's last token sees, this step's tokens included. `query_starts_B` is the first
    token of each row. `write_slots_T` is `page * P + offset` of each token's key. Entries of
    `page_table_BM` past a row's pages are ignored. `native` are the CPU kernels of the cache, if
    any: they keep values in another order. On a GPU, grids depend on the shapes of the tensors;
    `backend` names the kernels (see `attention_backends`), and `is_deterministic` fixes the order
    of sums, so that a token's result does not depend on other rows. `windowed` is the same batch
    over the pages of layers with a window, if they have pages of their own: entries of its page
    table before a row's windows are the null page.
    """

    page_table_BM: torch.Tensor
    context_lengths_B: torch.Tensor
    query_starts_B: torch.Tensor
    write_slots_T: torch.Tensor
    num_decode_rows: int
    host_query_lengths_B: Int64s
    host_context_lengths_B: Int64s
    native: CpuPagedKernels | None = None
    blocks_2T: torch.Tensor | None = None
    is_deterministic: bool = False
    backend: str = TRITON
    prompt_keys: PromptKeys | None = None
    """Where a library finds the keys of prompts; made by the first layer that needs it."""
    windowed: AttentionBatch | None = None
    groups: dict[int | None, list[_RowGroup]] = field(default_factory=dict)
    """The reference's plan of a step, by span; made by the first layer that uses it."""


def write_pages(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    pages: KvPages,
    batch: AttentionBatch,
) -> None:
    """Store this step's keys and values at `batch.write_slots_T`, as cells of the cache's type."""
    assert k_TKD.shape == v_TKD.shape
    assert k_TKD.shape[1:] == pages.k_NPKD.shape[2:]
    if batch.native is not None:
        batch.native.write_pages(k_TKD, v_TKD, pages, batch)
        return
    if k_TKD.is_cuda:
        from triptych.core.runtime.kernels.triton.rope_write import rope_write

        none = (None, 0.0, None, None, False)  # neither norm nor rotation
        rope_write(k_TKD, v_TKD, *none, *pages, batch.write_slots_T)
        return
    write_cells(k_TKD, pages.k_NPKD, pages.k_scale_NPK, batch.write_slots_T)
    write_cells(v_TKD, pages.v_NPKD, pages.v_scale_NPK, batch.write_slots_T)


def paged_attention(
    q_THD: torch.Tensor,
    pages: KvPages,
    batch: AttentionBatch,
    rule: AttentionRule,
) -> torch.Tensor:
    """Attention of every token over its row's pages; keys of this step must be written.

    A token sees itself and earlier tokens, within the window if there is one, and its block. Runs
    on `batch.native` where there is one. Returns `out_THD` in the type of `q_THD`.
    """
    (_, num_heads, head_dim), (*_, num_kv_heads, page_dim) = q_THD.shape, pages.k_NPKD.shape
    pages.check()
    assert head_dim == page_dim
    assert num_heads % num_kv_heads == 0
    assert q_THD.stride(2) == 1
    assert batch.page_table_BM.dtype == batch.write_slots_T.dtype == torch.int64
    if batch.native is not None:
        return batch.native.paged_attention(q_THD, pages, batch, rule)
    run = _on_gpu if q_THD.is_cuda else reference
    return run(q_THD, pages, batch, rule)


def _on_gpu(
    q_THD: torch.Tensor,
    pages: KvPages,
    batch: AttentionBatch,
    rule: AttentionRule,
) -> torch.Tensor:
    """Attend with one kernel for decode rows and one for prompt chunks; no value is read back."""
    from triptych.core.runtime.kernels.triton.float8 import as_stored
    from triptych.core.runtime.kernels.triton.paged_decode import paged_decode
    from triptych.core.runtime.kernels.triton.paged_prefill import paged_prefill

    scales, num_decode = (pages.k_scale_NPK, pages.v_scale_NPK), batch.num_decode_rows
    cached = (as_stored(pages.k_NPKD), as_stored(pages.v_NPKD), *scales)
    weighing = (rule.scale * rule.k_scale, rule.span, rule.soft_cap, rule.v_scale)
    out_THD = q_THD.new_empty(q_THD.shape)
    if num_decode:
        rows = slice(num_decode)
        paged_decode(
            *(q_THD[rows], *cached, batch.page_table_BM[rows], batch.context_lengths_B[rows]),
            *(out_THD[rows], rule.sinks_H, *weighing, batch.is_deterministic),
        )
    if len(batch.query_starts_B) > num_decode:
        rows = slice(num_decode, None)
        if _takes_library(batch, rule):
            out_THD[rows] = _prompts_by_library(q_THD[rows], pages, batch, rule)
            return out_THD
        blocks_2T = None if batch.blocks_2T is None else batch.blocks_2T[:, rows]
        paged_prefill(
            *(q_THD[rows], *cached, batch.page_table_BM[rows], batch.context_lengths_B[rows]),
            *(batch.query_starts_B[rows], num_decode),
            *(out_THD[rows], blocks_2T, rule.sinks_H, *weighing),
        )
    return out_THD


def _takes_library(batch: AttentionBatch, rule: AttentionRule) -> bool:
    """Whether the prompts of a step are attended by torch's library."""
    if batch.backend != FLASH or batch.blocks_2T is not None or not rule.is_plain:
        return False
    contexts = batch.host_context_lengths_B[batch.num_decode_rows :]
    return len(contexts) * int(contexts.max()) <= MAX_GATHERED_KEYS


def _prompts_by_library(
    q_THD: torch.Tensor, pages: KvPages, batch: AttentionBatch, rule: AttentionRule
) -> torch.Tensor:
    first, num_tokens = batch.num_decode_rows, len(q_THD)
    if batch.prompt_keys is None:
        batch.prompt_keys = find_prompt_keys(
            pages,
            batch.page_table_BM[first:],
            batch.context_lengths_B[first:],
            batch.query_starts_B[first:] - first,
            num_tokens,
            # In a captured step rows may have other numbers of queries than now.
            (num_tokens, int(batch.host_context_lengths_B[first:].max())),
        )
    return attend_prompts(q_THD, pages, batch.prompt_keys, scale=rule.scale, window=rule.window)


def reference(
    q_THD: torch.Tensor,
    pages: KvPages,
    batch: AttentionBatch,
    rule: AttentionRule,
) -> torch.Tensor:
    """Gather the keys of rows of similar length into one padded block; one SDPA per block.

    Values may have another width than keys.
    """
    if rule.span not in batch.groups:
        batch.groups[rule.span] = _plan_groups(batch, pages.k_NPKD.shape[:2], rule)
    groups = batch.groups[rule.span]
    outs = [_attend_group(q_THD, pages, group, rule) for group in groups]
    if len(groups) == 1 and groups[0].query_index_L is None:
        return outs[0]
    out_THD = q_THD.new_empty(*q_THD.shape[:2], pages.v_NPKD.shape[3])
    for group, out_LHD in zip(groups, outs, strict=True):
        assert group.query_index_L is not None
        # A clamped index repeats a row's last query, which writes equal values to the same place.
        out_THD.index_copy_(0, group.query_index_L, out_LHD)
    return out_THD


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """Rows of similar size, padded to one block. `query_index_L` is `None` for "all, in order"."""

    num_rows: int
    query_index_L: torch.Tensor | None
    key_slots_L: torch.Tensor
    mask_G1QS: torch.Tensor


def _attend_group(
    q_THD: torch.Tensor,
    pages: KvPages,
    group: _RowGroup,
    rule: AttentionRule,
) -> torch.Tensor:
    (num_heads, head_dim), num_kv_heads = q_THD.shape[1:], pages.k_NPKD.shape[2]
    index = group.query_index_L
    q_LHD = q_THD if index is None else q_THD.index_select(0, index)
    k_GKSD, v_GKSD = (
        read_cells(cells, scale, group.key_slots_L, q_THD.dtype)
        .unflatten(0, (group.num_rows, -1))
        .transpose(1, 2)
        for cells, scale in ((pages.k_NPKD, pages.k_scale_NPK), (pages.v_NPKD, pages.v_scale_NPK))
    )
    mask, scale = group.mask_G1QS, rule.scale
    if not rule.is_plain:
        q = q_LHD.view(group.num_rows, -1, num_heads, head_dim).transpose(1, 2)
        out = _weigh(q, k_GKSD, v_GKSD, mask, rule)
        return out.transpose(1, 2).reshape(len(q_LHD), num_heads, -1)
    if mask.shape[2] == 1:  # one query per row: heads of one key-value head become queries
        q = q_LHD.reshape(group.num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = scaled_dot_product_attention(q, k_GKSD, v_GKSD, attn_mask=mask, scale=scale)
        return out.reshape(len(q_LHD), num_heads, -1)
    q = q_LHD.view(group.num_rows, -1, num_heads, head_dim).transpose(1, 2)
    if not q.is_cpu:  # fused kernels of other devices do not take a mask and grouped heads together
        repeats = num_heads // num_kv_heads
        k_GKSD, v_GKSD = (x.repeat_interleave(repeats, dim=1) for x in (k_GKSD, v_GKSD))
    out = scaled_dot_product_attention(
        q, k_GKSD, v_GKSD, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k_GKSD.shape[1]
    )
    return out.transpose(1, 2).reshape(len(q_LHD), num_heads, -1)


def _weigh(
    q_GHQD: torch.Tensor,
    k_GKSD: torch.Tensor,
    v_GKSD: torch.Tensor,
    mask_G1QS: torch.Tensor,
    rule: AttentionRule,
) -> torch.Tensor:
    """Attention written out in float32, for rules without a fused kernel in torch."""
    repeats = q_GHQD.shape[1] // k_GKSD.shape[1]
    k_GHSD, v_GHSD = (x.float().repeat_interleave(repeats, dim=1) for x in (k_GKSD, v_GKSD))
    scores_GHQS = q_GHQD.float() @ k_GHSD.mT * (rule.scale * rule.k_scale)
    if rule.soft_cap is not None:
        scores_GHQS = rule.soft_cap * (scores_GHQS / rule.soft_cap).tanh()
    scores_GHQS = scores_GHQS.masked_fill(~mask_G1QS, -torch.inf)
    num_keys = scores_GHQS.shape[3]
    if rule.sinks_H is not None:
        sinks = rule.sinks_H.float().view(1, -1, 1, 1).expand(*scores_GHQS.shape[:3], 1)
        scores_GHQS = torch.cat((scores_GHQS, sinks), dim=3)
    probs_GHQS = scores_GHQS.softmax(dim=3)[..., :num_keys]
    return (probs_GHQS @ v_GHSD * rule.v_scale).to(q_GHQD.dtype)


def _plan_groups(
    batch: AttentionBatch, storage_NP: torch.Size, rule: AttentionRule
) -> list[_RowGroup]:
    """Group rows whose query and key counts agree within a factor of two."""
    query_lengths, context_lengths = batch.host_query_lengths_B, batch.host_context_lengths_B
    num_keys_B = context_lengths
    if rule.window is not None and batch.blocks_2T is None:
        num_keys_B = np.minimum(context_lengths, query_lengths + rule.window - 1)
    rows_by_size: dict[tuple[int, int], list[int]] = defaultdict(list)
    sizes = zip(query_lengths.tolist(), num_keys_B.tolist(), strict=True)
    for row, (num_queries, num_keys) in enumerate(sizes):
        key = (num_queries - 1).bit_length(), max(num_keys - 1, _MIN_GROUP_KEYS).bit_length()
        rows_by_size[key].append(row)
    return [
        _make_group(batch, np.array(rows), num_keys_B, storage_NP, rule)
        for rows in rows_by_size.values()
    ]


def _make_group(
    batch: AttentionBatch,
    rows: Int64s,
    num_keys_B: Int64s,
    storage_NP: torch.Size,
    rule: AttentionRule,
) -> _RowGroup:
    device = batch.page_table_BM.device
    num_pages, page_size = storage_NP
    max_queries = int(batch.host_query_lengths_B[rows].max())
    max_keys = int(num_keys_B[rows].max())
    host = np.stack([rows, batch.host_query_lengths_B[rows], num_keys_B[rows]])
    rows_G, num_queries_G1, num_keys_G1 = (
        to_device(torch.from_numpy(host), device).unsqueeze(2).unbind()
    )
    rows_G = rows_G.squeeze(1)
    context_G1 = batch.context_lengths_B[rows_G].unsqueeze(1)

    # Queries past a row's end repeat its last one, so no line of the mask is empty.
    query_GQ = torch.minimum(torch.arange(max_queries, device=device), num_queries_G1 - 1)
    query_position_GQ = context_G1 - num_queries_G1 + query_GQ
    # The host's lengths are upper limits in a captured step: there may be fewer keys.
    first_key_G1 = (context_G1 - num_keys_G1).clamp_(min=0)
    key_position_GS = first_key_G1 + torch.arange(max_keys, device=device)

    page_GS = (key_position_GS // page_size).clamp_(max=batch.page_table_BM.shape[1] - 1)
    slots_GS = batch.page_table_BM[rows_G].gather(1, page_GS) * page_size
    slots_GS += key_position_GS % page_size
    null_slot = (num_pages - 1) * page_size
    slots_GS.masked_fill_(key_position_GS >= context_G1, null_slot)

    token_GQ = batch.query_starts_B[rows_G].unsqueeze(1) + query_GQ
    first_GQ = last_GQ = query_position_GQ
    if batch.blocks_2T is not None:
        first_GQ, last_GQ = batch.blocks_2T[:, token_GQ]
    if rule.window is not None:
        to_first_GQ = query_position_GQ % rule.window if rule.is_chunked else rule.window - 1
        first_GQ = torch.minimum(first_GQ, query_position_GQ - to_first_GQ)
    mask_GQS = key_position_GS.unsqueeze(1) <= last_GQ.unsqueeze(2)
    if rule.window is not None:
        mask_GQS &= key_position_GS.unsqueeze(1) >= first_GQ.unsqueeze(2)
    is_whole_batch = len(rows) == len(batch.host_query_lengths_B)
    is_padded = (batch.host_query_lengths_B[rows] != max_queries).any()
    index = None
    if not is_whole_batch or is_padded:
        index = token_GQ.flatten()
    return _RowGroup(len(rows), index, slots_GS.flatten(), mask_GQS.unsqueeze(1))
