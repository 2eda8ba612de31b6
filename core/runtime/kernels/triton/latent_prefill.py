"""Attention of prompt chunks over latents: many queries per row, of any lengths.

Owns the kernel for `core.runtime.kernels.latent_attention` (the reference) of rows of several
tokens. A tile has some heads of some queries; all of them read the same rows of the cache. Blocks
begin at multiples of their size, counted from the row's first token, so that a token's result
depends neither on the chunks of its prompt nor on other rows.

Shapes: T tokens, B rows, M pages per row (of a tile: queries times heads), N pages of storage (of a
block: keys), P tokens per page, K = 1 head, H query heads, D a row's values, V of them that are
also the value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.attention_tiles import latent_tile_on
from triptych.core.runtime.kernels.triton.latent_rows import (
    attend_rows,
    check_latents,
    load_parts,
    row_sizes,
)
from triptych.core.runtime.kernels.triton.online_softmax import normalized, nothing_seen
from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.paged import UPLOADED, cells_of, pages_of, tiled_variants
from triptych.core.runtime.kernels.triton.paged_prefill import queries_of_row, row_of_tile
from triptych.core.runtime.kernels.triton.variant import Variant


def launch(
    q_THD: torch.Tensor,
    pages_NPKD: torch.Tensor,
    scale_NPK: torch.Tensor | None,
    page_table_BM: torch.Tensor,
    context_lengths_B: torch.Tensor,
    query_starts_B: torch.Tensor,
    first_token: int,
    out_THV: torch.Tensor,
    scale: float,
) -> None:
    """Attend, writing `out_THV`. Pages in uint8 hold the bits of float8 (e4m3).

    `query_starts_B` counts from `first_token` on, the first of `q_THD`. The grid depends on shapes
    only. Rows of length 0 get zeros.
    """
    check_latents(q_THD, pages_NPKD, scale_NPK, out_THV, scale)
    (num_tokens, num_heads, value_dim), num_rows = out_THV.shape, len(query_starts_B)
    if not num_tokens:
        return
    tile = latent_tile_on(q_THD.device, "prefill", q_THD.dtype)
    heads = _heads_of_tile(num_heads, tile.num_queries)
    # A row has at most one tile more than its tokens fill.
    num_tiles = triton.cdiv(num_tokens, tile.num_queries // heads) + num_rows
    _attend_tile[(num_tiles, triton.cdiv(num_heads, heads))](
        *(q_THD, pages_NPKD, scale_NPK, page_table_BM, context_lengths_B, query_starts_B),
        *(out_THV, scale, first_token, num_tokens, num_rows, page_table_BM.stride(0)),
        *(q_THD.stride(0), q_THD.stride(1)),
        NUM_HEADS=num_heads,
        PAGE_SIZE=pages_NPKD.shape[1],
        BLOCK_M=tile.num_queries,
        BLOCK_N=tile.num_keys,
        HAS_SCALES=scale_NPK is not None,
        **row_sizes(pages_NPKD.shape[3], value_dim),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


latent_prefill = define_operator("latent_prefill", launch, mutates=("out_THV",))


@fake_of(latent_prefill)
def _(
    q_THD: torch.Tensor,
    pages_NPKD: torch.Tensor,
    scale_NPK: torch.Tensor | None,
    page_table_BM: torch.Tensor,
    context_lengths_B: torch.Tensor,
    query_starts_B: torch.Tensor,
    first_token: int,
    out_THV: torch.Tensor,
    scale: float,
) -> None:
    check_latents(q_THD, pages_NPKD, scale_NPK, out_THV, scale)


def _heads_of_tile(num_heads: int, num_queries: int) -> int:
    """The heads of a tile: all, or an equal share of those that do not fit."""
    num_shares = -(-num_heads // num_queries)
    return -(-num_heads // num_shares)


@triton.jit(
    do_not_specialize=["first_token", "num_tokens", "num_rows", "table_stride"],
    do_not_specialize_on_alignment=UPLOADED,
)
def _attend_tile(
    q_ptr, k_ptr, k_scale_ptr, table_ptr, lengths_ptr, starts_ptr, out_ptr, scale,
    first_token, num_tokens, num_rows, table_stride, q_stride_t, q_stride_h,
    NUM_HEADS: tl.constexpr, ROW_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    SHARES: tl.constexpr = (NUM_HEADS + BLOCK_M - 1) // BLOCK_M
    TILE_HEADS: tl.constexpr = (NUM_HEADS + SHARES - 1) // SHARES  # as `_heads_of_tile`
    BLOCK_Q: tl.constexpr = BLOCK_M // TILE_HEADS
    # The last tiles of a row see the most keys, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = row_of_tile(starts_ptr, tile, first_token, num_rows, BLOCK_Q)
    start, num_queries = queries_of_row(starts_ptr, row, first_token, num_tokens, num_rows)
    first_query = (tile - start // BLOCK_Q - row) * BLOCK_Q
    if first_query >= num_queries:
        return
    index_M = tl.arange(0, BLOCK_M)
    query_M = first_query + index_M // TILE_HEADS
    head_M = tl.program_id(1) * TILE_HEADS + index_M % TILE_HEADS
    is_query_M = (query_M < num_queries) & (index_M < BLOCK_Q * TILE_HEADS) & (head_M < NUM_HEADS)
    query_M = tl.minimum(query_M, num_queries - 1)  # repeats the last, so that every line sees keys
    token_M = (start + query_M).to(tl.int64)
    last_M = tl.load(lengths_ptr + row).to(tl.int32) - num_queries + query_M
    end_key, first_cut = tl.max(last_M, 0) + 1, (tl.min(last_M, 0) + 1) // BLOCK_N * BLOCK_N

    q_ptrs_M = q_ptr + token_M * q_stride_t + head_M * q_stride_h
    q_MV, q_MP = load_parts(q_ptrs_M, is_query_M, ROW_DIM, VALUE_DIM, BLOCK_V, BLOCK_P)
    table_ptr += row.to(tl.int64) * table_stride
    max_M, sum_M, out_MV = nothing_seen(BLOCK_M, BLOCK_V)
    for is_cut in tl.static_range(2):  # first the blocks that every query sees whole
        begin, end = first_cut if is_cut else 0, end_key if is_cut else first_cut
        if begin < end:
            max_M, sum_M, out_MV = _attend_blocks(
                q_MV, q_MP, last_M, max_M, sum_M, out_MV, begin, end, end_key,
                k_ptr, k_scale_ptr, table_ptr, scale, ROW_DIM, VALUE_DIM, PAGE_SIZE,
                BLOCK_N, BLOCK_V, BLOCK_P, HAS_SCALES, IS_CUT=is_cut == 1,
            )  # fmt: skip
    dim_V = tl.arange(0, BLOCK_V)
    cell_MV = (token_M * NUM_HEADS + head_M)[:, None] * VALUE_DIM + dim_V
    out_MV = normalized(sum_M, out_MV, 1.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + cell_MV, out_MV, mask=is_query_M[:, None] & (dim_V < VALUE_DIM))


@triton.jit
def _attend_blocks(
    q_MV, q_MP, last_M, max_M, sum_M, out_MV, begin, end, end_key, k_ptr, k_scale_ptr, table_ptr,
    scale, ROW_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_P: tl.constexpr, HAS_SCALES: tl.constexpr,
    IS_CUT: tl.constexpr,
):  # fmt: skip
    """Add the keys from `begin` to `end` to a tile; with `IS_CUT` queries see some of them only."""
    index_N = tl.arange(0, BLOCK_N)
    page_N = pages_of(table_ptr, begin + index_N, begin + index_N < end_key, PAGE_SIZE)
    for block in range(begin, end, BLOCK_N):
        position_N = block + index_N
        is_read_N, next_N = position_N < end_key, position_N + BLOCK_N
        slot_N = cells_of(page_N, position_N, 0, 1, PAGE_SIZE)
        page_N = pages_of(table_ptr, next_N, next_N < end_key, PAGE_SIZE)
        max_M, sum_M, out_MV = attend_rows(
            q_MV, q_MP, max_M, sum_M, out_MV, position_N <= last_M[:, None], k_ptr, k_scale_ptr,
            slot_N, is_read_N, scale, ROW_DIM, VALUE_DIM, BLOCK_V, BLOCK_P, HAS_SCALES, IS_CUT,
        )  # fmt: skip
    return max_M, sum_M, out_MV


def variants() -> tuple[Variant, ...]:
    """DeepSeek-V3 over bfloat16, GLM-4.7-Flash over bfloat16, float8 and int8."""
    common = {"PAGE_SIZE": 32, **row_sizes(576, 512)}
    deepseek, glm = ({**common, "NUM_HEADS": number} for number in (128, 20))
    return (
        *tiled_variants("causal_128", "prefill", _attend_tile, deepseek),
        *tiled_variants("causal_20", "prefill", _attend_tile, glm),
        *tiled_variants("causal_float8", "prefill", _attend_tile, glm, cache="*u8"),
        *tiled_variants("causal_int8", "prefill", _attend_tile, glm, "HAS_SCALES", cache="*i8"),
    )
