"""The choice of keys by an index: scores of all keys of a token, and the slots of the highest.

Owns the kernels for `core.runtime.kernels.key_index` (the reference). A program scores a block of
keys for one token, and another one chooses among all scores of a token: it finds the lowest chosen
score two bits at a time, and lists slots in the order of positions. Tokens that see no more keys
than are chosen need no scores.

Shapes: T tokens, B rows, M pages per row, N pages of storage (of a block: keys), P tokens per page,
K = 1 head, H heads of the index, D their values, S keys, C chosen keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.kv_pages import LatentPages
from triptych.core.runtime.kernels.triton.float8 import dequantized
from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.paged import cell_scales, cells_of, pages_of
from triptych.core.runtime.kernels.triton.tiling import dot
from triptych.core.runtime.kernels.triton.variant import Variant

_BLOCK_KEYS = 64
_BLOCK_SCORES = 1024
_NUM_WARPS = 4


def launch_scores(
    q_THD: torch.Tensor,
    weights_TH: torch.Tensor,
    pages_NPKD: torch.Tensor,
    scale_NPK: torch.Tensor | None,
    table_BM: torch.Tensor,
    row_T: torch.Tensor,
    seen_T: torch.Tensor,
    num_chosen: int,
    scale: float,
) -> torch.Tensor:
    """Scores `[T, S]`, for as many keys as a row of the page table has.

    Those of keys that a token does not see are not written, and none of a token that sees no more
    than `num_chosen`. Pages in uint8 hold the bits of float8 (e4m3).
    """
    scores_TS = _new_scores(
        *(q_THD, weights_TH, pages_NPKD, scale_NPK, table_BM, row_T, seen_T, num_chosen, scale)
    )
    (num_tokens, num_heads, head_dim), max_keys = q_THD.shape, scores_TS.shape[1]
    num_blocks = triton.cdiv(max_keys, _BLOCK_KEYS)
    if num_tokens:
        _score_keys[(num_tokens * num_blocks,)](
            *(q_THD, weights_TH, pages_NPKD, scale_NPK, table_BM, row_T, seen_T, scores_TS),
            *(scale, num_blocks, max_keys, num_chosen, table_BM.stride(0), q_THD.stride(0)),
            *(q_THD.stride(1), weights_TH.stride(0)),
            PAGE_SIZE=pages_NPKD.shape[1],
            HAS_SCALES=scale_NPK is not None,
            **_sizes(num_heads, head_dim),
            num_warps=_NUM_WARPS,
            num_stages=2,
        )
    return scores_TS


score_keys = define_operator("score_keys", launch_scores)


@fake_of(score_keys)
def _new_scores(
    q_THD: torch.Tensor,
    weights_TH: torch.Tensor,
    pages_NPKD: torch.Tensor,
    scale_NPK: torch.Tensor | None,
    table_BM: torch.Tensor,
    row_T: torch.Tensor,
    seen_T: torch.Tensor,
    num_chosen: int,
    scale: float,
) -> torch.Tensor:
    LatentPages(pages_NPKD, pages_NPKD, scale_NPK, scale_NPK).check()
    assert q_THD.shape[2] == pages_NPKD.shape[3]
    assert q_THD.stride(2) == weights_TH.stride(1) == table_BM.stride(1) == 1
    assert weights_TH.shape == q_THD.shape[:2]
    assert row_T.shape == seen_T.shape == q_THD.shape[:1]
    assert num_chosen > 0
    assert scale > 0
    num_keys = table_BM.shape[1] * pages_NPKD.shape[1]
    return q_THD.new_empty(len(q_THD), num_keys, dtype=torch.float32)


def launch_choice(
    scores_TS: torch.Tensor,
    table_BM: torch.Tensor,
    row_T: torch.Tensor,
    seen_T: torch.Tensor,
    slots_TC: torch.Tensor,
    page_size: int,
) -> None:
    """List the slots of each token's chosen keys; what follows them in a row is not written."""
    _check_choice(scores_TS, table_BM, row_T, seen_T, slots_TC, page_size)
    if len(scores_TS):
        _choose_slots[(len(scores_TS),)](
            *(scores_TS, table_BM, row_T, seen_T, slots_TC),
            *(scores_TS.stride(0), table_BM.stride(0), slots_TC.stride(0), slots_TC.shape[1]),
            PAGE_SIZE=page_size,
            BLOCK=_BLOCK_SCORES,
            num_warps=_NUM_WARPS,
            num_stages=2,
        )


choose_slots = define_operator("choose_slots", launch_choice, mutates=("slots_TC",))


@fake_of(choose_slots)
def _check_choice(
    scores_TS: torch.Tensor,
    table_BM: torch.Tensor,
    row_T: torch.Tensor,
    seen_T: torch.Tensor,
    slots_TC: torch.Tensor,
    page_size: int,
) -> None:
    assert scores_TS.dtype is torch.float32
    assert scores_TS.stride(1) == slots_TC.stride(1) == table_BM.stride(1) == 1
    assert row_T.shape == seen_T.shape == scores_TS.shape[:1] == slots_TC.shape[:1]
    assert scores_TS.shape[1] == table_BM.shape[1] * page_size


def _sizes(num_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_H": max(triton.next_power_of_2(num_heads), 16),
        "BLOCK_D": max(triton.next_power_of_2(head_dim), 16),
        "BLOCK_N": _BLOCK_KEYS,
    }


@triton.jit(
    do_not_specialize=["num_blocks", "max_keys", "num_chosen", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "row_ptr", "seen_ptr"],
)
def _score_keys(
    q_ptr, weights_ptr, k_ptr, k_scale_ptr, table_ptr, row_ptr, seen_ptr, scores_ptr,
    scale, num_blocks, max_keys, num_chosen, table_stride, q_stride_t, q_stride_h, weights_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // num_blocks).to(tl.int64)
    first = tl.program_id(0) % num_blocks * BLOCK_N
    num_seen = tl.load(seen_ptr + token).to(tl.int32)
    if (num_seen <= num_chosen) | (first >= num_seen):
        return
    position_N, dim_D, head_H = (
        first + tl.arange(0, BLOCK_N),
        tl.arange(0, BLOCK_D),
        tl.arange(0, BLOCK_H),
    )
    is_seen_N, is_dim_D, is_head_H = position_N < num_seen, dim_D < HEAD_DIM, head_H < NUM_HEADS
    table_ptr += tl.load(row_ptr + token) * table_stride
    page_N = pages_of(table_ptr, position_N, is_seen_N, PAGE_SIZE)
    slot_N = cells_of(page_N, position_N, 0, 1, PAGE_SIZE)
    k_mask_ND = is_seen_N[:, None] & is_dim_D[None, :]
    k_ND = tl.load(k_ptr + slot_N[:, None] * HEAD_DIM + dim_D[None, :], mask=k_mask_ND, other=0)
    q_ptrs_DH = q_ptr + token * q_stride_t + head_H[None, :] * q_stride_h + dim_D[:, None]
    q_DH = tl.load(q_ptrs_DH, mask=is_dim_D[:, None] & is_head_H[None, :], other=0)
    products_NH = dot(dequantized(k_ND, q_DH.dtype), q_DH, tl.zeros([BLOCK_N, BLOCK_H], tl.float32))
    scale_N = cell_scales(k_scale_ptr, slot_N, is_seen_N, HAS_SCALES) * scale
    weight_H = tl.load(weights_ptr + token * weights_stride + head_H, mask=is_head_H, other=0.0)
    score_N = tl.sum(tl.maximum(products_NH * scale_N[:, None], 0.0) * weight_H[None, :], 1)
    tl.store(scores_ptr + token * max_keys + position_N, score_N, mask=is_seen_N)


@triton.jit
def _ranks(scores_ptr, at, num_seen):
    """Integers of the order of scores, from 0 on; -1 past the end. Both zeros are one."""
    score = tl.load(scores_ptr + at, mask=at < num_seen, other=0.0) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    return tl.where(at < num_seen, rank, -1)


@triton.jit
def _lowest_chosen(scores_ptr, num_seen, num_chosen, BLOCK: tl.constexpr):
    """The highest rank that at least `num_chosen` keys reach, and how many are above it."""
    lowest = tl.full([], 0, tl.int64)
    num_above = tl.full([], 0, tl.int32)
    step = tl.full([], 1 << 30, tl.int64)
    while step > 0:
        num_1 = tl.zeros([BLOCK], tl.int32)
        num_2 = tl.zeros([BLOCK], tl.int32)
        num_3 = tl.zeros([BLOCK], tl.int32)
        num_4 = tl.zeros([BLOCK], tl.int32)
        for first in range(0, num_seen, BLOCK):
            rank = _ranks(scores_ptr, first + tl.arange(0, BLOCK), num_seen)
            num_1 += (rank >= lowest + step).to(tl.int32)
            num_2 += (rank >= lowest + 2 * step).to(tl.int32)
            num_3 += (rank >= lowest + 3 * step).to(tl.int32)
            num_4 += (rank >= lowest + 4 * step).to(tl.int32)
        reached_1, reached_2 = tl.sum(num_1, 0), tl.sum(num_2, 0)
        reached_3, reached_4 = tl.sum(num_3, 0), tl.sum(num_4, 0)
        digit = (reached_1 >= num_chosen).to(tl.int32) + (reached_2 >= num_chosen).to(tl.int32)
        digit += (reached_3 >= num_chosen).to(tl.int32)
        num_above = tl.where(
            digit == 0,
            reached_1,
            tl.where(digit == 1, reached_2, tl.where(digit == 2, reached_3, reached_4)),
        )
        lowest += digit * step
        step = step // 4
    return lowest, num_above


@triton.jit(
    do_not_specialize=["scores_stride", "table_stride", "slots_stride", "num_chosen"],
    do_not_specialize_on_alignment=["table_ptr", "row_ptr", "seen_ptr"],
)
def _choose_slots(
    scores_ptr, table_ptr, row_ptr, seen_ptr, slots_ptr,
    scores_stride, table_stride, slots_stride, num_chosen,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    scores_ptr += token * scores_stride
    slots_ptr += token * slots_stride
    table_ptr += tl.load(row_ptr + token) * table_stride
    num_seen = tl.load(seen_ptr + token).to(tl.int32)
    lowest = tl.full([], 0, tl.int64)
    num_above = tl.full([], 0, tl.int32)
    has_limit = num_seen > num_chosen
    if has_limit:
        lowest, num_above = _lowest_chosen(scores_ptr, num_seen, num_chosen, BLOCK)
    num_listed, num_equal = tl.full([], 0, tl.int32), num_chosen - num_above
    for first in range(0, num_seen, BLOCK):
        position_N = first + tl.arange(0, BLOCK)
        is_seen_N = position_N < num_seen
        rank_N = _ranks(scores_ptr, position_N, num_seen)
        is_equal_N = ((rank_N == lowest) & has_limit & is_seen_N).to(tl.int32)
        is_equal_kept_N = (is_equal_N > 0) & (tl.cumsum(is_equal_N, 0) <= num_equal)
        is_kept_N = is_seen_N & ((rank_N > lowest) | (has_limit == 0) | is_equal_kept_N)
        place_N = num_listed + tl.cumsum(is_kept_N.to(tl.int32), 0) - 1
        page_N = pages_of(table_ptr, position_N, is_seen_N, PAGE_SIZE)
        slot_N = cells_of(page_N, position_N, 0, 1, PAGE_SIZE)
        tl.store(slots_ptr + place_N, slot_N, mask=is_kept_N)
        num_listed += tl.sum(is_kept_N.to(tl.int32), 0)
        num_equal -= tl.sum(is_equal_N, 0)


def variants() -> tuple[Variant, ...]:
    """DeepSeek-V3.2 over bfloat16, float8 and int8, GLM-5 over bfloat16; the choice."""
    return (
        _score_variant("score_64", 64, "*bf16"),
        _score_variant("score_64_float8", 64, "*u8"),
        _score_variant("score_64_int8", 64, "*i8"),
        _score_variant("score_32", 32, "*bf16"),
        _choice_variant(),
    )


_UPLOADED = dict.fromkeys(("table_ptr", "row_ptr", "seen_ptr"), "*i64")


def _score_variant(name: str, num_heads: int, cells: str) -> Variant:
    has_scales = cells == "*i8"
    constants: dict[str, Any] = {
        **_sizes(num_heads, 128),
        "PAGE_SIZE": 32,
        "HAS_SCALES": has_scales,
    }
    constants |= {} if has_scales else {"k_scale_ptr": None}
    types = {"q_ptr": "*bf16", "weights_ptr": "*fp32", "k_ptr": cells, "k_scale_ptr": "*bf16"}
    types |= _UPLOADED | {"scores_ptr": "*fp32", "scale": "fp32"}
    return _variant(name, _score_keys, types, constants)


def _choice_variant() -> Variant:
    types = {"scores_ptr": "*fp32", **_UPLOADED, "slots_ptr": "*i64"}
    return _variant("choose", _choose_slots, types, {"PAGE_SIZE": 32, "BLOCK": _BLOCK_SCORES})


def _variant(name: str, kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Variant:
    kinds = types | dict.fromkeys(constants, "constexpr")
    signature = {each: kinds.get(each, "i32") for each in kernel.arg_names}
    aligned = {each for each, kind in signature.items() if kind[0] == "*"} - set(_UPLOADED)
    strides = {
        each for each in signature if each.endswith(("stride_t", "stride_h", "weights_stride"))
    }
    return Variant(
        name=name,
        kernel=kernel,
        signature=signature,
        constants=constants,
        divisible=frozenset(aligned | strides),
        num_warps=_NUM_WARPS,
        num_stages=2,
    )
