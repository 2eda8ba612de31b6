"""Common parts of the kernels of attention over latents: contract, queries, one block of rows.

Owns the product of queries with rows, whose first values are also the values. Knows nothing of
grids.

Shapes: T tokens, H query heads, D a row's values, V of them that are also the value, P the others;
M queries of a tile, N rows of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.kv_pages import LatentPages
from triptych.core.runtime.kernels.triton.float8 import dequantized
from triptych.core.runtime.kernels.triton.online_softmax import weigh_block
from triptych.core.runtime.kernels.triton.paged import cell_scales
from triptych.core.runtime.kernels.triton.tiling import dot


def check_latents(
    q_THD: torch.Tensor,
    pages_NPKD: torch.Tensor,
    scale_NPK: torch.Tensor | None,
    out_THV: torch.Tensor,
    scale: float,
) -> None:
    """Check the arguments of both kinds of rows."""
    LatentPages(pages_NPKD, pages_NPKD, scale_NPK, scale_NPK).check()
    assert q_THD.shape[2] == pages_NPKD.shape[3]
    assert q_THD.stride(2) == 1
    assert out_THV.shape[:2] == q_THD.shape[:2]
    assert out_THV.shape[2] <= q_THD.shape[2]
    assert out_THV.is_contiguous()
    assert scale > 0


def row_sizes(row_dim: int, value_dim: int) -> dict[str, int]:
    """The constants of rows: their sizes, and those of the two parts of a tile."""
    rest = row_dim - value_dim
    return {
        "ROW_DIM": row_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_V": max(triton.next_power_of_2(value_dim), 16),
        "BLOCK_P": max(triton.next_power_of_2(rest), 16) if rest else 16,
    }


@triton.jit
def load_parts(ptrs_M, is_read_M, ROW_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
               BLOCK_V: tl.constexpr, BLOCK_P: tl.constexpr):  # fmt: skip
    """Load rows or queries at `ptrs_M`, in two parts."""
    dim_V, dim_P = tl.arange(0, BLOCK_V), VALUE_DIM + tl.arange(0, BLOCK_P)
    is_read_MV = is_read_M[:, None] & (dim_V < VALUE_DIM)
    is_read_MP = is_read_M[:, None] & (dim_P < ROW_DIM)
    x_MV = tl.load(ptrs_M[:, None] + dim_V, mask=is_read_MV, other=0)
    x_MP = tl.load(ptrs_M[:, None] + dim_P, mask=is_read_MP, other=0)
    return x_MV, x_MP


@triton.jit
def attend_rows(
    q_MV, q_MP, max_M, sum_M, out_MV, is_seen_MN, k_ptr, k_scale_ptr, slot_N, is_read_N, scale,
    ROW_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_P: tl.constexpr,
    HAS_SCALES: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Add the rows at `slot_N` to the state of a tile."""
    k_NV, k_NP = load_parts(
        k_ptr + slot_N * ROW_DIM, is_read_N, ROW_DIM, VALUE_DIM, BLOCK_V, BLOCK_P
    )
    v_NV, k_NP = dequantized(k_NV, q_MV.dtype), dequantized(k_NP, q_MV.dtype)
    scores_MN = tl.zeros([q_MV.shape[0], v_NV.shape[0]], tl.float32)
    scores_MN = dot(q_MP, tl.trans(k_NP), scores_MN)
    scores_MN = dot(q_MV, tl.trans(v_NV), scores_MN)
    cell_scale_N = cell_scales(k_scale_ptr, slot_N, is_read_N, HAS_SCALES)
    return weigh_block(
        scores_MN, v_NV, is_seen_MN, max_M, sum_M, out_MV, cell_scale_N, cell_scale_N,
        scale, 0.0, HAS_SCALES, False, IS_MASKED,
    )  # fmt: skip
