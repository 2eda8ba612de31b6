"""Attention of decode rows over paged keys and values: one query per row, many keys.

Owns the kernels for `core.runtime.kernels.paged_attention` (the reference) of rows of one token. A
row's keys are divided into splits (`decode_splits.py`) that are attended in parallel, and joined by
their log-sum-exp (Dao et al. 2023, "Flash-Decoding"). All query heads of a key-value head share one
tile, so a key is read once.

Shapes: B rows, M pages per row, N pages of storage, P tokens per page, H query heads, K key-value
heads, D head dim, S parts (of a block: splits).
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.kv_pages import KvPages
from triptych.core.runtime.kernels.triton.attention_tiles import tile_on
from triptych.core.runtime.kernels.triton.decode_splits import (
    DecodeSplits,
    divided_rows,
    first_of_window,
    keys_of_part,
    num_wanted_splits,
    parts_of_row,
)
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

_MAX_HEADS_PER_TILE = 64
SPLITS_PER_STEP = 16
"""Splits of a row that are joined at a time."""


def launch_paged_decode(
    q_BHD: torch.Tensor,
    k_pages_NPKD: torch.Tensor,
    v_pages_NPKD: torch.Tensor,
    k_scale_NPK: torch.Tensor | None,
    v_scale_NPK: torch.Tensor | None,
    page_table_BM: torch.Tensor,
    context_lengths_B: torch.Tensor,
    out_BHD: torch.Tensor,
    sinks_H: torch.Tensor | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    v_scale: float,
    is_deterministic: bool,
) -> None:
    """Attend, writing `out_BHD`. Pages in uint8 hold the bits of float8 (e4m3).

    `scale` includes that of the keys. Grids depend on shapes only: a row may be as long as its page
    table, and one of length 0 gets zeros.
    """
    pages = KvPages(k_pages_NPKD, v_pages_NPKD, k_scale_NPK, v_scale_NPK)
    check_paged(q_BHD, pages, out_BHD, sinks_H, scale)
    (num_rows, num_heads, head_dim), page_size = q_BHD.shape, k_pages_NPKD.shape[1]
    num_tiles = k_pages_NPKD.shape[2] * triton.cdiv(*_heads_per_tile(q_BHD, k_pages_NPKD))
    max_keys = page_table_BM.shape[1] * page_size
    num_wanted = None if is_deterministic else num_wanted_splits(q_BHD.device, num_tiles)
    splits_of = partial(
        DecodeSplits.of_rows, max_keys=max_keys, window=window, num_wanted=num_wanted
    )
    for rows, splits in divided_rows(num_rows, splits_of, num_heads * head_dim):
        _launch(
            q_BHD[rows],
            pages,
            (page_table_BM[rows], context_lengths_B[rows]),
            sinks_H,
            out_BHD[rows],
            (scale, soft_cap or 0.0, v_scale, window or 0),
            splits,
        )


def _launch(
    q_BHD: torch.Tensor,
    pages: KvPages,
    rows: tuple[torch.Tensor, torch.Tensor],
    sinks_H: torch.Tensor | None,
    out_BHD: torch.Tensor,
    numbers: tuple[float, float, float, int],
    splits: DecodeSplits,
) -> None:
    table_BM, lengths_B = rows
    _, soft_cap, v_scale, window = numbers
    num_rows, num_heads, head_dim = q_BHD.shape
    _, page_size, num_kv_heads, _ = pages.k_NPKD.shape
    group, block_h = _heads_per_tile(q_BHD, pages.k_NPKD)
    tile = tile_on(q_BHD.device, "decode", head_dim, q_BHD.dtype)
    partial_SHD = q_BHD.new_empty(splits.num_parts, num_heads, head_dim, dtype=torch.float32)
    log_sums_SH = q_BHD.new_empty(splits.num_parts, num_heads, dtype=torch.float32)
    constants = {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d(head_dim),
        "HAS_WINDOW": window != 0,
        "HAS_SINKS": sinks_H is not None,
        "IS_FIXED": splits.is_fixed,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    num_tiles = num_kv_heads * triton.cdiv(group, block_h)
    _attend_split[(splits.num_parts * num_tiles,)](
        *(q_BHD, *pages, *rows, sinks_H, out_BHD, partial_SHD, log_sums_SH),
        *(*numbers, num_rows, splits.limit),
        *(table_BM.stride(0), q_BHD.stride(0), q_BHD.stride(1)),
        NUM_KV_HEADS=num_kv_heads,
        PAGE_SIZE=page_size,
        BLOCK_H=block_h,
        BLOCK_N=tile.num_keys,
        HAS_SOFT_CAP=soft_cap > 0,
        HAS_SCALES=pages.k_scale_NPK is not None,
        **constants,
    )
    join_splits[(num_rows, num_heads)](
        *(partial_SHD, log_sums_SH, lengths_B, sinks_H, out_BHD),
        *(v_scale, window, num_rows, splits.limit),
        BLOCK_S=SPLITS_PER_STEP,
        **constants,
    )


paged_decode = define_operator("paged_decode", launch_paged_decode, mutates=("out_BHD",))


@fake_of(paged_decode)
def _(
    q_BHD: torch.Tensor,
    k_pages_NPKD: torch.Tensor,
    v_pages_NPKD: torch.Tensor,
    k_scale_NPK: torch.Tensor | None,
    v_scale_NPK: torch.Tensor | None,
    page_table_BM: torch.Tensor,
    context_lengths_B: torch.Tensor,
    out_BHD: torch.Tensor,
    sinks_H: torch.Tensor | None,
    scale: float,
    *_: object,
) -> None:
    pages = KvPages(k_pages_NPKD, v_pages_NPKD, k_scale_NPK, v_scale_NPK)
    check_paged(q_BHD, pages, out_BHD, sinks_H, scale)


def _heads_per_tile(q_BHD: torch.Tensor, k_pages_NPKD: torch.Tensor) -> tuple[int, int]:
    """Query heads of a key-value head, and the number of them in a tile."""
    group = q_BHD.shape[1] // k_pages_NPKD.shape[2]
    return group, min(max(triton.next_power_of_2(group), 16), _MAX_HEADS_PER_TILE)


@triton.jit(
    do_not_specialize=["window", "num_rows", "limit", "table_stride"],
    do_not_specialize_on_alignment=UPLOADED,
)
def _attend_split(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr, sinks_ptr,
    out_ptr, partial_ptr, log_sums_ptr, scale, soft_cap, v_scale,
    window, num_rows, limit, table_stride, q_stride_b, q_stride_h,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr, IS_FIXED: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    TILES: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    # Programs of one part run close together: the keys of all heads are side by side in a page.
    part = tl.program_id(0) // (NUM_KV_HEADS * TILES)
    tile = tl.program_id(0) % (NUM_KV_HEADS * TILES)
    row, num_splits, begin, end = keys_of_part(
        part, lengths_ptr, num_rows, limit, window, HAS_WINDOW, IS_FIXED
    )
    if begin >= end:
        return
    row = row.to(tl.int64)
    kv_head = tile // TILES
    in_group_H = tile % TILES * BLOCK_H + tl.arange(0, BLOCK_H)
    head_H = kv_head * GROUP + in_group_H
    is_head_H, dim_D = in_group_H < GROUP, tl.arange(0, BLOCK_D)
    is_held_HD = is_head_H[:, None] & (dim_D < HEAD_DIM)
    first = 0
    if HAS_WINDOW:
        first = first_of_window(tl.load(lengths_ptr + row).to(tl.int32), window)
    start = tl.maximum(begin, first // BLOCK_N * BLOCK_N)
    q_ptrs_HD = q_ptr + row * q_stride_b + head_H[:, None] * q_stride_h + dim_D
    q_HD = tl.load(q_ptrs_HD, mask=is_held_HD, other=0.0)
    max_H, sum_H, out_HD = nothing_seen(BLOCK_H, BLOCK_D)
    table_ptr += row * table_stride
    index_N = tl.arange(0, BLOCK_N)
    page_N = pages_of(table_ptr, start + index_N, start + index_N < end, PAGE_SIZE)
    for block in range(start, end, BLOCK_N):
        position_N = block + index_N
        is_seen_N = (position_N < end) & (position_N >= first)
        cell_N = cells_of(page_N, position_N, kv_head, NUM_KV_HEADS, PAGE_SIZE)
        next_N = position_N + BLOCK_N
        page_N = pages_of(table_ptr, next_N, next_N < end, PAGE_SIZE)
        k_ND, v_ND = load_cells(k_ptr, v_ptr, cell_N, is_seen_N, dim_D, HEAD_DIM)
        max_H, sum_H, out_HD = attend_block(
            q_HD, dequantized(tl.trans(k_ND), q_HD.dtype), dequantized(v_ND, q_HD.dtype),
            is_seen_N[None, :], max_H, sum_H, out_HD,
            cell_scales(k_scale_ptr, cell_N, is_seen_N, HAS_SCALES),
            cell_scales(v_scale_ptr, cell_N, is_seen_N, HAS_SCALES),
            scale, soft_cap, HAS_SCALES, HAS_SOFT_CAP, IS_MASKED=True,
        )  # fmt: skip

    state = max_H, sum_H, out_HD
    cell_HD = head_H[:, None] * HEAD_DIM + dim_D
    if num_splits == 1:
        sinks_ptrs_H = sinks_ptr + head_H if HAS_SINKS else None
        out_ptrs_HD = out_ptr + row * NUM_HEADS * HEAD_DIM + cell_HD
        store_whole(state, out_ptrs_HD, sinks_ptrs_H, v_scale, is_head_H, is_held_HD)
    else:
        index = part.to(tl.int64) * NUM_HEADS
        partial_ptrs_HD = partial_ptr + index * HEAD_DIM + cell_HD
        store_part(state, partial_ptrs_HD, log_sums_ptr + index + head_H, is_head_H, is_held_HD)


@triton.jit
def store_whole(state, into, sinks_ptrs_H, v_scale, is_head_H, is_held_HD):
    """Store the attention of a row whose keys are all in this split."""
    max_H, sum_H, out_HD = state
    if sinks_ptrs_H is not None:
        sinks_H = tl.load(sinks_ptrs_H, mask=is_head_H, other=0.0)
        max_H, sum_H, out_HD = with_sinks(max_H, sum_H, out_HD, sinks_H.to(tl.float32))
    out_HD = normalized(sum_H, out_HD, v_scale).to(into.dtype.element_ty)
    tl.store(into, out_HD, mask=is_held_HD)


@triton.jit
def store_part(state, into, log_sums_ptrs_H, is_head_H, is_held_HD):
    """Store one split's state for `join_splits`."""
    max_H, sum_H, out_HD = state
    tl.store(into, normalized(sum_H, out_HD, 1.0), mask=is_held_HD)
    tl.store(log_sums_ptrs_H, max_H + tl.log2(sum_H), mask=is_head_H)


@triton.jit(
    do_not_specialize=["window", "num_rows", "limit"],
    do_not_specialize_on_alignment=UPLOADED,
)
def join_splits(
    partial_ptr,
    log_sums_ptr,
    lengths_ptr,
    sinks_ptr,
    out_ptr,
    v_scale,
    window,
    num_rows,
    limit,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_FIXED: tl.constexpr,
):
    """Join the parts of rows that have several, and write zeros for rows without keys."""
    row, head = tl.program_id(0), tl.program_id(1)
    first_part, num_parts = parts_of_row(
        row, lengths_ptr, num_rows, limit, window, HAS_WINDOW, IS_FIXED
    )
    if num_parts == 1:
        return
    row, dim_D = row.to(tl.int64), tl.arange(0, BLOCK_D)
    max_1 = tl.full([1], float("-inf"), tl.float32)
    sum_1 = tl.zeros([1], tl.float32)
    out_1D = tl.zeros([1, BLOCK_D], tl.float32)
    for begin in range(0, num_parts, BLOCK_S):
        part_S = begin + tl.arange(0, BLOCK_S)
        is_written_S = part_S < num_parts
        index_S = (first_part + part_S).to(tl.int64) * NUM_HEADS + head
        log_sum_S = tl.load(log_sums_ptr + index_S, mask=is_written_S, other=float("-inf"))
        partial_SD = tl.load(
            partial_ptr + index_S[:, None] * HEAD_DIM + dim_D,
            mask=is_written_S[:, None] & (dim_D < HEAD_DIM),
            other=0.0,
        )
        new_max_1 = tl.maximum(max_1, tl.max(log_sum_S, 0))
        weight_S = tl.exp2(log_sum_S - new_max_1)
        rescale_1 = tl.exp2(max_1 - new_max_1)
        sum_1 = sum_1 * rescale_1 + tl.sum(weight_S, 0)
        out_1D = out_1D * rescale_1[:, None] + tl.sum(weight_S[:, None] * partial_SD, 0)[None, :]
        max_1 = new_max_1
    if HAS_SINKS:
        sink_1 = tl.load(sinks_ptr + head + tl.arange(0, 1)).to(tl.float32)
        max_1, sum_1, out_1D = with_sinks(max_1, sum_1, out_1D, sink_1)
    out_1D = normalized(sum_1, out_1D, v_scale).to(out_ptr.dtype.element_ty)
    cell_1D = (row * NUM_HEADS + head) * HEAD_DIM + dim_D[None, :]
    tl.store(out_ptr + cell_1D, out_1D, mask=dim_D[None, :] < HEAD_DIM)


def variants() -> tuple[Variant, ...]:
    """Llama 3 8B over bfloat16 and int8, Gemma 2 9B over float8, Gemma 4 12B, and GPT-OSS 20B."""
    common = {"PAGE_SIZE": 32, "BLOCK_H": 16, "BLOCK_S": SPLITS_PER_STEP}
    llama = {**common, "NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128}
    gemma = {**common, "NUM_HEADS": 16, "NUM_KV_HEADS": 8, "HEAD_DIM": 256}
    gemma4 = {**common, "NUM_HEADS": 16, "NUM_KV_HEADS": 1, "HEAD_DIM": 512}
    gpt_oss = {**common, "NUM_HEADS": 64, "NUM_KV_HEADS": 8, "HEAD_DIM": 64}
    gemma_flags = ("HAS_WINDOW", "HAS_SOFT_CAP")
    of_gpt_oss = ("HAS_WINDOW", "HAS_SINKS", "IS_FIXED")
    return (
        *tiled_variants("split", "decode", _attend_split, llama),
        *tiled_variants("split_float8", "decode", _attend_split, gemma, *gemma_flags, cache="*u8"),
        *tiled_variants("split_512", "decode", _attend_split, gemma4),
        *tiled_variants("split_int8", "decode", _attend_split, llama, "HAS_SCALES", cache="*i8"),
        *tiled_variants("split_fixed", "decode", _attend_split, gpt_oss, *of_gpt_oss),
        *tiled_variants("join", "decode", join_splits, llama),
        *tiled_variants("join_fixed", "decode", join_splits, gpt_oss, *of_gpt_oss),
    )


def odd_variants() -> tuple[Variant, ...]:
    """Heads of other sizes and types, and page sizes and groups that are no powers of two."""
    common = {"PAGE_SIZE": 16, "BLOCK_H": 16, "BLOCK_S": SPLITS_PER_STEP}
    phi = {**common, "NUM_HEADS": 32, "NUM_KV_HEADS": 32, "HEAD_DIM": 96}
    one = {**common, "NUM_HEADS": 71, "NUM_KV_HEADS": 1, "HEAD_DIM": 64, "BLOCK_H": 64}
    wide = {**common, "NUM_HEADS": 14, "NUM_KV_HEADS": 2, "HEAD_DIM": 192}
    return (
        *tiled_variants("split_96", "decode", _attend_split, phi, dtype=torch.float16),
        *tiled_variants("split_71_heads", "decode", _attend_split, one),
        *tiled_variants("split_192", "decode", _attend_split, wide, "HAS_WINDOW"),
        *tiled_variants("split_fp32", "decode", _attend_split, phi, dtype=torch.float32),
    )
