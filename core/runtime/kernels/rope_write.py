"""From a layer's projection to its queries and its pages: head norms, rotation, and the write.

Owns their order. A GPU runs them in one kernel, a CPU one after the other.

Shapes: T tokens, H query heads, K key-value heads, D head dim, N pages, P page size, R rotated
dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triptych.core.runtime.kernels.kv_pages import KvPages
from triptych.core.runtime.kernels.paged_attention import AttentionBatch, write_pages
from triptych.core.runtime.kernels.rms_norm import rms_norm
from triptych.core.runtime.kernels.rotary import rotary


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The norm of query and key heads; a row of weights for each, queries first (X = H + K)."""

    weight_XD: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """A step's rows of `core.runtime.layers.rotary`, and whether pairs are adjacent."""

    cos_T1R: torch.Tensor
    sin_T1R: torch.Tensor
    is_interleaved: bool = False


def rope_write(
    qkv_TXD: torch.Tensor,
    norm: HeadNorm | None,
    rotation: Rotation | None,
    pages: KvPages,
    batch: AttentionBatch,
) -> torch.Tensor:
    """Normalize and rotate query and key heads, and write keys and values. Returns `q_THD`.

    `qkv_TXD` has the heads of queries, keys and values in that order. Keys and values are written
    in the type of `pages`.
    """
    num_kv_heads = pages.k_NPKD.shape[2]
    qk_TXD, v_TKD = qkv_TXD.tensor_split((qkv_TXD.shape[1] - num_kv_heads,), dim=1)
    if qkv_TXD.is_cuda:
        from triptych.core.runtime.kernels.triton.rope_write import rope_write as on_gpu

        q_THD: torch.Tensor = on_gpu(
            qk_TXD,
            v_TKD,
            *((None, 0.0) if norm is None else (norm.weight_XD, norm.eps)),
            *((None, None) if rotation is None else (rotation.cos_T1R, rotation.sin_T1R)),
            rotation is not None and rotation.is_interleaved,
            *pages,
            batch.write_slots_T,
        )
        return q_THD
    if norm is not None:
        qk_TXD = rms_norm(qk_TXD, norm.weight_XD, norm.eps)
    if rotation is not None:
        qk_TXD = rotary(
            qk_TXD, rotation.cos_T1R, rotation.sin_T1R, is_interleaved=rotation.is_interleaved
        )
    q_THD, k_TKD = qk_TXD.tensor_split((-num_kv_heads,), dim=1)
    write_pages(k_TKD, v_TKD, pages, batch)
    return q_THD
