"""Attention of prompt chunks by torch's FlashAttention, over keys gathered from their pages.

Owns the gathering and the call (Dao 2023, arXiv:2307.08691). The keys of all rows are copied, each
row's as many as the longest has, so that shapes follow from the host's limits alone and a captured
step may be replayed for rows of any length.

Shapes: T tokens of the prompts, R rows, M pages per row, P tokens per page, H query heads, K
key-value heads, D head dim, S keys of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triptych.core.runtime.kernels.kv_pages import KvPages, read_cells

MAX_GATHERED_KEYS = 2**16
"""Steps whose prompt rows have more keys, counted as the longest row times their number, are left
to our kernel: the copies are memory in addition to the cache."""


def gathered_bytes(num_kv_heads: int, head_dim: int, cells: torch.dtype, dtype: torch.dtype) -> int:
    """The most memory of the copies of one layer's keys and values."""
    bytes_per_value = dtype.itemsize + (0 if cells is dtype else cells.itemsize)
    if cells is torch.int8:
        bytes_per_value += 2 * torch.float32.itemsize  # the values and their scaled ones
    return 2 * MAX_GATHERED_KEYS * num_kv_heads * head_dim * bytes_per_value


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """The places of the keys of a step's prompt rows, for all of its layers.

    `slots_L` has `max_keys` for each row, of which `used_R` exist. `query_starts_R1` and
    `key_starts_R1` end with the number of tokens, and of slots.
    """

    slots_L: torch.Tensor
    used_R: torch.Tensor
    query_starts_R1: torch.Tensor
    key_starts_R1: torch.Tensor
    max_queries: int
    max_keys: int


def find_prompt_keys(
    pages: KvPages,
    page_table_RM: torch.Tensor,
    context_lengths_R: torch.Tensor,
    query_starts_R: torch.Tensor,
    num_tokens: int,
    limits: tuple[int, int],
) -> PromptKeys:
    """Find them. `limits` are the most queries and the most keys that a row may have.

    `query_starts_R` counts from the first token of the prompts, of which there are `num_tokens`.
    """
    (num_pages, page_size), device = pages.k_NPKD.shape[:2], page_table_RM.device
    (num_rows, width), (max_queries, max_keys) = page_table_RM.shape, limits
    max_keys = min(max_keys, width * page_size)
    positions_S = torch.arange(max_keys, device=device)
    slots_RS = page_table_RM[:, : -(-max_keys // page_size)].repeat_interleave(page_size, 1)
    slots_RS = slots_RS[:, :max_keys] * page_size + positions_S % page_size
    null_slot = (num_pages - 1) * page_size
    slots_RS = slots_RS.masked_fill_(positions_S >= context_lengths_R[:, None], null_slot)
    ends = torch.full((1,), num_tokens, dtype=torch.int32, device=device)
    return PromptKeys(
        slots_RS.flatten(),
        context_lengths_R.to(torch.int32),
        torch.cat((query_starts_R.to(torch.int32), ends)),
        torch.arange(num_rows + 1, dtype=torch.int32, device=device) * max_keys,
        max_queries,
        max_keys,
    )


def attend_prompts(
    q_THD: torch.Tensor,
    pages: KvPages,
    keys: PromptKeys,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend to a row's earlier tokens, within the window if there is one; `out_THD`."""
    k_LKD, v_LKD = (
        read_cells(cells, cell_scale, keys.slots_L, q_THD.dtype)
        for cells, cell_scale in (
            (pages.k_NPKD, pages.k_scale_NPK),
            (pages.v_NPKD, pages.v_scale_NPK),
        )
    )
    found = torch.ops.aten._flash_attention_forward(
        q_THD,
        k_LKD,
        v_LKD,
        keys.query_starts_R1,
        keys.key_starts_R1,
        keys.max_queries,
        keys.max_keys,
        0.0,  # dropout
        True,  # causal, a row's last query at its last key
        False,  # no debug mask
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
        seqused_k=keys.used_R,
    )
    out_THD: torch.Tensor = found[0]
    return out_THD
