"""Attention of decode rows over latents: one query per head and row, many rows of the cache.

Owns the kernel for `core.runtime.kernels.latent_attention` (the reference) of rows of one token. A
row's keys are divided as in `paged_decode`, and its splits are joined by that module's kernel. A
block of the cache is loaded once for keys and values, by a tile of heads.

Shapes: B rows, M pages per row, N pages of storage (of a block: keys), P tokens per page, K = 1
head, H query heads, D a row's values, V of them that are also the value, S splits.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.attention_tiles import latent_tile_on
from triptych.core.runtime.kernels.triton.decode_splits import (
    DecodeSplits,
    divided_rows,
    keys_of_part,
    num_wanted_splits,
)
from triptych.core.runtime.kernels.triton.latent_rows import (
    attend_rows,
    check_latents,
    load_parts,
    row_sizes,
)
from triptych.core.runtime.kernels.triton.online_softmax import nothing_seen
from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.paged import UPLOADED, cells_of, pages_of, tiled_variants
from triptych.core.runtime.kernels.triton.paged_decode import (
    SPLITS_PER_STEP,
    join_splits,
    store_part,
    store_whole,
)
from triptych.core.runtime.kernels.triton.variant import Variant


def launch(
    q_BHD: torch.Tensor,
    pages_NPKD: torch.Tensor,
    scale_NPK: torch.Tensor | None,
    page_table_BM: torch.Tensor,
    context_lengths_B: torch.Tensor,
    out_BHV: torch.Tensor,
    scale: float,
    is_deterministic: bool,
) -> None:
    """Attend, writing `out_BHV`. Pages in uint8 hold the bits of float8 (e4m3).

    Grids depend on shapes only: a row may be as long as its page table, and one of length 0 gets
    zeros.
    """
    check_latents(q_BHD, pages_NPKD, scale_NPK, out_BHV, scale)
    (num_rows, num_heads, value_dim), page_size = out_BHV.shape, pages_NPKD.shape[1]
    tile = latent_tile_on(q_BHD.device, "decode", q_BHD.dtype)
    num_tiles = triton.cdiv(num_heads, tile.num_queries)
    splits_of = partial(
        DecodeSplits.of_rows,
        max_keys=page_table_BM.shape[1] * page_size,
        window=None,
        num_wanted=None if is_deterministic else num_wanted_splits(q_BHD.device, num_tiles),
    )
    for rows, splits in divided_rows(num_rows, splits_of, num_heads * value_dim):
        _launch(
            q_BHD[rows],
            (pages_NPKD, scale_NPK),
            (page_table_BM[rows], context_lengths_B[rows]),
            out_BHV[rows],
            scale,
            splits,
        )


def _launch(
    q_BHD: torch.Tensor,
    cached: tuple[torch.Tensor, torch.Tensor | None],
    rows: tuple[torch.Tensor, torch.Tensor],
    out_BHV: torch.Tensor,
    scale: float,
    splits: DecodeSplits,
) -> None:
    (num_rows, num_heads, value_dim), (pages_NPKD, scale_NPK) = out_BHV.shape, cached
    table_BM, lengths_B = rows
    tile = latent_tile_on(q_BHD.device, "decode", q_BHD.dtype)
    partial_SHV = q_BHD.new_empty(splits.num_parts, num_heads, value_dim, dtype=torch.float32)
    log_sums_SH = q_BHD.new_empty(splits.num_parts, num_heads, dtype=torch.float32)
    launched = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    sizes = row_sizes(pages_NPKD.shape[3], value_dim)
    num_tiles = triton.cdiv(num_heads, tile.num_queries)
    _attend_split[(splits.num_parts * num_tiles,)](
        *(q_BHD, *cached, *rows, out_BHV, partial_SHV, log_sums_SH, scale),
        *(num_rows, splits.limit, table_BM.stride(0), q_BHD.stride(0), q_BHD.stride(1)),
        NUM_HEADS=num_heads,
        PAGE_SIZE=pages_NPKD.shape[1],
        BLOCK_M=tile.num_queries,
        BLOCK_N=tile.num_keys,
        HAS_SCALES=scale_NPK is not None,
        IS_FIXED=splits.is_fixed,
        **sizes,
        **launched,
    )
    join_splits[(num_rows, num_heads)](
        *(partial_SHV, log_sums_SH, lengths_B, None, out_BHV),
        *(1.0, 0, num_rows, splits.limit),
        NUM_HEADS=num_heads,
        HEAD_DIM=value_dim,
        BLOCK_S=SPLITS_PER_STEP,
        BLOCK_D=sizes["BLOCK_V"],
        HAS_WINDOW=False,
        HAS_SINKS=False,
        IS_FIXED=splits.is_fixed,
        **launched,
    )


latent_decode = define_operator("latent_decode", launch, mutates=("out_BHV",))


@fake_of(latent_decode)
def _(
    q_BHD: torch.Tensor,
    pages_NPKD: torch.Tensor,
    scale_NPK: torch.Tensor | None,
    page_table_BM: torch.Tensor,
    context_lengths_B: torch.Tensor,
    out_BHV: torch.Tensor,
    scale: float,
    is_deterministic: bool,
) -> None:
    check_latents(q_BHD, pages_NPKD, scale_NPK, out_BHV, scale)


@triton.jit(
    do_not_specialize=["num_rows", "limit", "table_stride"],
    do_not_specialize_on_alignment=UPLOADED,
)
def _attend_split(
    q_ptr, k_ptr, k_scale_ptr, table_ptr, lengths_ptr, out_ptr, partial_ptr, log_sums_ptr, scale,
    num_rows, limit, table_stride, q_stride_b, q_stride_h,
    NUM_HEADS: tl.constexpr, ROW_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr, HAS_SCALES: tl.constexpr, IS_FIXED: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (NUM_HEADS + BLOCK_M - 1) // BLOCK_M
    part = tl.program_id(0) // TILES
    head_M = tl.program_id(0) % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    row, num_splits, begin, end = keys_of_part(
        part, lengths_ptr, num_rows, limit, 0, False, IS_FIXED
    )
    if begin >= end:
        return
    row, is_head_M = row.to(tl.int64), head_M < NUM_HEADS
    q_ptrs_M = q_ptr + row * q_stride_b + head_M * q_stride_h
    q_MV, q_MP = load_parts(q_ptrs_M, is_head_M, ROW_DIM, VALUE_DIM, BLOCK_V, BLOCK_P)
    max_M, sum_M, out_MV = nothing_seen(BLOCK_M, BLOCK_V)
    table_ptr += row * table_stride
    index_N = tl.arange(0, BLOCK_N)
    page_N = pages_of(table_ptr, begin + index_N, begin + index_N < end, PAGE_SIZE)
    for block in range(begin, end, BLOCK_N):
        position_N = block + index_N
        is_seen_N, next_N = position_N < end, position_N + BLOCK_N
        slot_N = cells_of(page_N, position_N, 0, 1, PAGE_SIZE)
        page_N = pages_of(table_ptr, next_N, next_N < end, PAGE_SIZE)
        max_M, sum_M, out_MV = attend_rows(
            q_MV, q_MP, max_M, sum_M, out_MV, is_seen_N[None, :], k_ptr, k_scale_ptr,
            slot_N, is_seen_N, scale, ROW_DIM, VALUE_DIM, BLOCK_V, BLOCK_P, HAS_SCALES, True,
        )  # fmt: skip
    state, dim_V = (max_M, sum_M, out_MV), tl.arange(0, BLOCK_V)
    cell_MV = head_M[:, None] * VALUE_DIM + dim_V
    is_held_MV = is_head_M[:, None] & (dim_V < VALUE_DIM)
    if num_splits == 1:
        out_ptrs_MV = out_ptr + row * NUM_HEADS * VALUE_DIM + cell_MV
        store_whole(state, out_ptrs_MV, None, 1.0, is_head_M, is_held_MV)
    else:
        index = part.to(tl.int64) * NUM_HEADS
        partial_ptrs_MV = partial_ptr + index * VALUE_DIM + cell_MV
        store_part(state, partial_ptrs_MV, log_sums_ptr + index + head_M, is_head_M, is_held_MV)


def variants() -> tuple[Variant, ...]:
    """DeepSeek-V3 and Kimi K2 over bfloat16, GLM-4.7-Flash over all types; fixed splits.

    Rows that an index chose are pages of one.
    """
    common = {"PAGE_SIZE": 32, **row_sizes(576, 512)}
    deepseek, kimi, glm = ({**common, "NUM_HEADS": number} for number in (128, 64, 20))
    join = {"NUM_HEADS": 128, "HEAD_DIM": 512, "BLOCK_D": 512, "BLOCK_S": SPLITS_PER_STEP, **common}
    chosen, chosen_64 = ({**each, "PAGE_SIZE": 1} for each in (deepseek, kimi))
    return (
        *tiled_variants("chosen_128", "decode", _attend_split, chosen),
        *tiled_variants("chosen_64", "decode", _attend_split, chosen_64),
        *tiled_variants("chosen_float8", "decode", _attend_split, chosen, cache="*u8"),
        *tiled_variants("chosen_int8", "decode", _attend_split, chosen, "HAS_SCALES", cache="*i8"),
        *tiled_variants("chosen_fixed", "decode", _attend_split, chosen, "IS_FIXED"),
        *tiled_variants("split_128", "decode", _attend_split, deepseek),
        *tiled_variants("split_64", "decode", _attend_split, kimi),
        *tiled_variants("split_20", "decode", _attend_split, glm),
        *tiled_variants("split_float8", "decode", _attend_split, glm, cache="*u8"),
        *tiled_variants("split_int8", "decode", _attend_split, glm, "HAS_SCALES", cache="*i8"),
        *tiled_variants("split_fixed", "decode", _attend_split, deepseek, "IS_FIXED"),
        *tiled_variants("join", "decode", join_splits, join),
    )
