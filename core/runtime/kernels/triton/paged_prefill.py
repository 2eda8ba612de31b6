"""Attention of prompt chunks over paged keys and values: many queries per row, of any lengths.

Owns the kernel for `core.runtime.kernels.paged_attention` (the reference) of rows of several
tokens, whose earlier tokens may be in the pages already. Queries of all heads of a key-value head
share one tile. Blocks of keys begin at multiples of their size, counted from the row's first token,
so that a token's result depends neither on the chunks of its prompt nor on other rows.

Shapes: T tokens, B rows, M pages per row (of a tile: queries times heads), N pages of storage (of a
block: keys), P tokens per page, H query heads, K key-value heads, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.kv_pages import KvPages
from triptych.core.runtime.kernels.triton.attention_tiles import tile_on
from triptych.core.runtime.kernels.triton.float8 import dequantized
from triptych.core.runtime.kernels.triton.online_softmax import (
    attend_block,
    normalized,
    nothing_seen,
    with_sinks,
)
from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.paged import (
    UPLOADED,
    block_d,
    cell_scales,
    cells_of,
    check_paged,
    load_cells,
    pages_of,
    tiled_variants,
)
from triptych.core.runtime.kernels.triton.variant import Variant


def launch_paged_prefill(
    q_THD: torch.Tensor,
    k_pages_NPKD: torch.Tensor,
    v_pages_NPKD: torch.Tensor,
    k_scale_NPK: torch.Tensor | None,
    v_scale_NPK: torch.Tensor | None,
    page_table_BM: torch.Tensor,
    context_lengths_B: torch.Tensor,
    query_starts_B: torch.Tensor,
    first_token: int,
    out_THD: torch.Tensor,
    blocks_2T: torch.Tensor | None,
    sinks_H: torch.Tensor | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    v_scale: float,
) -> None:
    """Attend, writing `out_THD`. Pages in uint8 hold the bits of float8 (e4m3).

    `query_starts_B` counts from `first_token` on, the first of `q_THD`. `scale` includes that of
    the keys. The grid depends on shapes only. Rows of length 0 get zeros.
    """
    pages = KvPages(k_pages_NPKD, v_pages_NPKD, k_scale_NPK, v_scale_NPK)
    check_paged(q_THD, pages, out_THD, sinks_H, scale)
    _check_blocks(q_THD, blocks_2T)
    (num_tokens, num_heads, head_dim), num_rows = q_THD.shape, len(query_starts_B)
    if not num_tokens:
        return
    num_kv_heads = k_pages_NPKD.shape[2]
    group = num_heads // num_kv_heads
    tile = tile_on(q_THD.device, "prefill", head_dim, q_THD.dtype)
    block_m = max(tile.num_queries, triton.next_power_of_2(group))
    # A row has at most one tile more than its tokens fill.
    num_tiles = triton.cdiv(num_tokens, block_m // group) + num_rows
    _attend_tile[(num_tiles, num_kv_heads)](
        *(q_THD, *pages, page_table_BM, context_lengths_B, query_starts_B),
        *(blocks_2T, sinks_H, out_THD),
        *(scale, soft_cap or 0.0, v_scale, window or 0),
        *(first_token, num_tokens, num_rows, 0 if blocks_2T is None else blocks_2T.stride(0)),
        *(page_table_BM.stride(0), q_THD.stride(0), q_THD.stride(1)),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=k_pages_NPKD.shape[1],
        BLOCK_M=block_m,
        BLOCK_N=tile.num_keys,
        BLOCK_D=block_d(head_dim),
        HAS_BLOCKS=blocks_2T is not None,
        HAS_WINDOW=window is not None,
        HAS_SOFT_CAP=soft_cap is not None,
        HAS_SINKS=sinks_H is not None,
        HAS_SCALES=k_scale_NPK is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


paged_prefill = define_operator("paged_prefill", launch_paged_prefill, mutates=("out_THD",))


@fake_of(paged_prefill)
def _(
    q_THD: torch.Tensor,
    k_pages_NPKD: torch.Tensor,
    v_pages_NPKD: torch.Tensor,
    k_scale_NPK: torch.Tensor | None,
    v_scale_NPK: torch.Tensor | None,
    page_table_BM: torch.Tensor,
    context_lengths_B: torch.Tensor,
    query_starts_B: torch.Tensor,
    first_token: int,
    out_THD: torch.Tensor,
    blocks_2T: torch.Tensor | None,
    sinks_H: torch.Tensor | None,
    scale: float,
    *_: object,
) -> None:
    pages = KvPages(k_pages_NPKD, v_pages_NPKD, k_scale_NPK, v_scale_NPK)
    check_paged(q_THD, pages, out_THD, sinks_H, scale)
    _check_blocks(q_THD, blocks_2T)


def _check_blocks(q_THD: torch.Tensor, blocks_2T: torch.Tensor | None) -> None:
    assert blocks_2T is None or blocks_2T.shape == (2, q_THD.shape[0])
    assert blocks_2T is None or blocks_2T.stride(1) == 1


@triton.jit(
    do_not_specialize=[
        "window",
        "first_token",
        "num_tokens",
        "num_rows",
        "blocks_stride",
        "table_stride",
    ],
    do_not_specialize_on_alignment=UPLOADED,
)
def _attend_tile(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, starts_ptr, blocks_ptr,
    sinks_ptr, out_ptr, scale, soft_cap, v_scale,
    window, first_token, num_tokens, num_rows, blocks_stride, table_stride, q_stride_t, q_stride_h,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_BLOCKS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # The last tiles of a row see the most keys, so they start first.
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row = row_of_tile(starts_ptr, tile, first_token, num_rows, BLOCK_Q)
    start, num_queries = queries_of_row(starts_ptr, row, first_token, num_tokens, num_rows)
    first_query = (tile - start // BLOCK_Q - row) * BLOCK_Q
    if first_query >= num_queries:
        return

    index_M, dim_D = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query_M = first_query + index_M // GROUP
    is_query_M = (query_M < num_queries) & (index_M < BLOCK_Q * GROUP)
    query_M = tl.minimum(query_M, num_queries - 1)  # repeats the last, so that every line sees keys
    token_M = (start + query_M).to(tl.int64)
    head_M = kv_head * GROUP + index_M % GROUP
    is_held_MD = is_query_M[:, None] & (dim_D < HEAD_DIM)
    position_M = tl.load(lengths_ptr + row).to(tl.int32) - num_queries + query_M
    first_M, last_M = position_M, position_M
    if HAS_BLOCKS:
        first_M = tl.load(blocks_ptr + token_M).to(tl.int32)
        last_M = tl.load(blocks_ptr + blocks_stride + token_M).to(tl.int32)
    end_key = tl.max(last_M, 0) + 1
    if HAS_WINDOW:  # most of its blocks are cut at one end or the other: all are masked
        to_first_M = tl.where(window > 0, window - 1, position_M % tl.abs(window))
        first_M = tl.minimum(first_M, position_M - to_first_M)
        first_cut = tl.min(first_M, 0)
    else:
        first_cut = tl.min(last_M, 0) + 1
    first_cut = tl.maximum(first_cut, 0) // BLOCK_N * BLOCK_N

    q_ptrs_MD = q_ptr + token_M[:, None] * q_stride_t + head_M[:, None] * q_stride_h + dim_D
    q_MD = tl.load(q_ptrs_MD, mask=is_held_MD, other=0.0)
    table_ptr += row.to(tl.int64) * table_stride
    max_M, sum_M, out_MD = nothing_seen(BLOCK_M, BLOCK_D)
    for is_cut in tl.static_range(2):  # first the blocks that every query sees whole
        begin, end = first_cut if is_cut else 0, end_key if is_cut else first_cut
        if (is_cut or not HAS_WINDOW) and begin < end:
            max_M, sum_M, out_MD = _attend_blocks(
                q_MD, first_M, last_M, max_M, sum_M, out_MD, begin, end, end_key,
                k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, kv_head, scale, soft_cap,
                NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D,
                HAS_WINDOW, HAS_SOFT_CAP, HAS_SCALES, IS_CUT=is_cut == 1,
            )  # fmt: skip

    if HAS_SINKS:
        sinks_M = tl.load(sinks_ptr + head_M).to(tl.float32)
        max_M, sum_M, out_MD = with_sinks(max_M, sum_M, out_MD, sinks_M)
    cell_MD = (token_M * NUM_HEADS + head_M)[:, None] * HEAD_DIM + dim_D
    out_MD = normalized(sum_M, out_MD, v_scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + cell_MD, out_MD, mask=is_held_MD)


@triton.jit
def _attend_blocks(
    q_MD, first_M, last_M, max_M, sum_M, out_MD, begin, end, end_key,
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, kv_head, scale, soft_cap,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr, HAS_SCALES: tl.constexpr, IS_CUT: tl.constexpr,
):  # fmt: skip
    """Add the keys from `begin` to `end` to a tile; with `IS_CUT` queries see some of them only."""
    dim_D = tl.arange(0, BLOCK_D)
    index_N = tl.arange(0, BLOCK_N)
    page_N = pages_of(table_ptr, begin + index_N, begin + index_N < end_key, PAGE_SIZE)
    for block in range(begin, end, BLOCK_N):
        position_N = block + index_N
        is_read_N = position_N < end_key
        cell_N = cells_of(page_N, position_N, kv_head, NUM_KV_HEADS, PAGE_SIZE)
        next_N = position_N + BLOCK_N
        page_N = pages_of(table_ptr, next_N, next_N < end_key, PAGE_SIZE)
        k_ND, v_ND = load_cells(k_ptr, v_ptr, cell_N, is_read_N, dim_D, HEAD_DIM)
        is_seen_MN = position_N <= last_M[:, None]
        if HAS_WINDOW:
            is_seen_MN &= position_N >= first_M[:, None]
        max_M, sum_M, out_MD = attend_block(
            q_MD, tl.trans(dequantized(k_ND, q_MD.dtype)), dequantized(v_ND, q_MD.dtype),
            is_seen_MN, max_M, sum_M, out_MD,
            cell_scales(k_scale_ptr, cell_N, is_read_N, HAS_SCALES),
            cell_scales(v_scale_ptr, cell_N, is_read_N, HAS_SCALES),
            scale, soft_cap, HAS_SCALES, HAS_SOFT_CAP, IS_MASKED=IS_CUT,
        )  # fmt: skip
    return max_M, sum_M, out_MD


@triton.jit
def queries_of_row(starts_ptr, row, first_token, num_tokens, num_rows):
    """The first of a row's queries among those of all rows, and their number."""
    start = tl.load(starts_ptr + row).to(tl.int32) - first_token
    next_row = tl.minimum(row + 1, num_rows - 1)
    next_start = tl.load(starts_ptr + next_row).to(tl.int32) - first_token
    return start, tl.where(row + 1 < num_rows, next_start, num_tokens) - start


@triton.jit
def row_of_tile(starts_ptr, tile, first_token, num_rows, BLOCK_Q: tl.constexpr):
    """The last row whose tiles begin at `tile` or before.

    Row `b` has tiles from `start // BLOCK_Q + b` on: those of all rows before it fit below.
    """
    low, high = tl.full([], 0, tl.int32), num_rows
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(starts_ptr + middle).to(tl.int32) - first_token
        is_before = start // BLOCK_Q + middle <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low


def variants() -> tuple[Variant, ...]:
    """Llama 3 8B over bfloat16 and int8, Gemma 3 with images over float8, Gemma 4, GPT-OSS 20B."""
    llama = {"PAGE_SIZE": 32, "NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128}
    gemma = {"PAGE_SIZE": 32, "NUM_HEADS": 16, "NUM_KV_HEADS": 8, "HEAD_DIM": 256}
    gemma4 = {"PAGE_SIZE": 32, "NUM_HEADS": 16, "NUM_KV_HEADS": 1, "HEAD_DIM": 512}
    gpt_oss = {"PAGE_SIZE": 32, "NUM_HEADS": 64, "NUM_KV_HEADS": 8, "HEAD_DIM": 64}
    flags = ("HAS_WINDOW", "HAS_BLOCKS", "HAS_SOFT_CAP")
    of_gpt_oss = ("HAS_WINDOW", "HAS_SINKS")
    return (
        *tiled_variants("causal", "prefill", _attend_tile, llama),
        *tiled_variants("blocks_float8", "prefill", _attend_tile, gemma, *flags, cache="*u8"),
        *tiled_variants("causal_512", "prefill", _attend_tile, gemma4),
        *tiled_variants("causal_int8", "prefill", _attend_tile, llama, "HAS_SCALES", cache="*i8"),
        *tiled_variants("window_sinks", "prefill", _attend_tile, gpt_oss, *of_gpt_oss),
    )


def odd_variants() -> tuple[Variant, ...]:
    """Heads of other sizes and types, and groups that are no powers of two."""
    phi = {"PAGE_SIZE": 16, "NUM_HEADS": 32, "NUM_KV_HEADS": 32, "HEAD_DIM": 96}
    small = {"PAGE_SIZE": 16, "NUM_HEADS": 9, "NUM_KV_HEADS": 3, "HEAD_DIM": 64}
    wide = {"PAGE_SIZE": 16, "NUM_HEADS": 14, "NUM_KV_HEADS": 2, "HEAD_DIM": 192}
    return (
        *tiled_variants("causal_96", "prefill", _attend_tile, phi, dtype=torch.float16),
        *tiled_variants("causal_64", "prefill", _attend_tile, small),
        *tiled_variants("window_192", "prefill", _attend_tile, wide, "HAS_WINDOW"),
        *tiled_variants("causal_fp32", "prefill", _attend_tile, phi, dtype=torch.float32),
    )
