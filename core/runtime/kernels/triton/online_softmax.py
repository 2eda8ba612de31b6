"""Softmax of attention block by block, without the whole matrix of scores.

Owns the running maximum, sum and output of a tile (Milakov and Gimelshein 2018, arXiv:1805.02867;
Dao 2023, arXiv:2307.08691). Knows nothing of pages, rows or grids.

Scores are powers of two: a kernel multiplies them by log2(e) once. A block without keys that a
query sees leaves that query's state unchanged, bit by bit, and a block's sums do not depend on the
other queries of the tile. A query's result therefore depends only on where blocks begin.

Shapes: M queries of a tile, N keys of a block, D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.tiling import dot

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def nothing_seen(M: tl.constexpr, D: tl.constexpr):
    """The maximum, sum and output of a tile before its first block."""
    max_M = tl.full([M], float("-inf"), tl.float32)
    return max_M, tl.zeros([M], tl.float32), tl.zeros([M, D], tl.float32)


@triton.jit
def attend_block(
    q_MD,
    k_DN,
    v_ND,
    is_seen_MN,
    max_M,
    sum_M,
    out_MD,
    k_scale_N,
    v_scale_N,
    scale,
    soft_cap,
    HAS_SCALES: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Add one block of keys to the state of a tile. `scale` is positive.

    With `HAS_SCALES` keys and values are multiples of `k_scale_N` and `v_scale_N`.
    """
    no_scores_MN = tl.zeros([q_MD.shape[0], k_DN.shape[1]], tl.float32)
    return weigh_block(
        dot(q_MD, k_DN, no_scores_MN), v_ND, is_seen_MN, max_M, sum_M, out_MD,
        k_scale_N, v_scale_N, scale, soft_cap, HAS_SCALES, HAS_SOFT_CAP, IS_MASKED,
    )  # fmt: skip


@triton.jit
def weigh_block(
    scores_MN,
    v_ND,
    is_seen_MN,
    max_M,
    sum_M,
    out_MD,
    k_scale_N,
    v_scale_N,
    scale,
    soft_cap,
    HAS_SCALES: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Add one block to the state of a tile; the products of queries and keys are given."""
    if HAS_SCALES:
        scores_MN *= k_scale_N[None, :]
    factor = scale * LOG2E
    if HAS_SOFT_CAP:
        # tanh(x) = 1 - 2 / (e^2x + 1), which is exact at both infinities.
        scores_MN = 1.0 - 2.0 / (tl.exp2(scores_MN * (2.0 * factor / soft_cap)) + 1.0)
        factor = soft_cap * LOG2E
    if IS_MASKED:
        scores_MN = tl.where(is_seen_MN, scores_MN, float("-inf"))
    new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1) * factor)
    shift_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    probs_MN = tl.exp2(scores_MN * factor - shift_M[:, None])
    rescale_M = tl.exp2(max_M - shift_M)
    sum_M = sum_M * rescale_M + tl.sum(probs_MN, 1)
    if HAS_SCALES:
        probs_MN *= v_scale_N[None, :]
    out_MD = out_MD * rescale_M[:, None]
    out_MD = dot(probs_MN.to(v_ND.dtype), v_ND, out_MD)
    return new_max_M, sum_M, out_MD


@triton.jit
def with_sinks(max_M, sum_M, out_MD, sinks_M):
    """Add a key without a value to each query, whose score is its sink."""
    new_max_M = tl.maximum(max_M, sinks_M * LOG2E)
    rescale_M = tl.exp2(max_M - new_max_M)
    sum_M = sum_M * rescale_M + tl.exp2(sinks_M * LOG2E - new_max_M)
    return new_max_M, sum_M, out_MD * rescale_M[:, None]


@triton.jit
def normalized(sum_M, out_MD, v_scale):
    """The final output; zeros for a query that saw no keys."""
    return out_MD * (v_scale / tl.where(sum_M == 0.0, 1.0, sum_M))[:, None]
