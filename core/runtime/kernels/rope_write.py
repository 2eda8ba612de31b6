"""From a layer's projection to its queries and its pages: head norms, rotation, and the write.

Owns their order. A GPU runs the common ones in one kernel, a CPU one after the other.

Shapes: T tokens, H query heads, K key-value heads, D head dim, N pages, P page size, R rotated
dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from triptych.core.runtime.kernels.kv_pages import KvPages
from triptych.core.runtime.kernels.paged_attention import AttentionBatch, write_pages
from triptych.core.runtime.kernels.rms_norm import layer_norm, rms_norm
from triptych.core.runtime.kernels.rotary import rotary


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The norm of query and key heads; a row of weights for each, queries first (X = H + K).

    It is a layer norm if `kind` says so. With `is_joint` all query heads are normalized as one row,
    and all key heads as another.
    """

    weight_XD: torch.Tensor
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    is_joint: bool = False
    is_after_rotation: bool = False


@dataclass(frozen=True, slots=True)
class Rotation:
    """A step's rows of `core.runtime.layers.rotary`, and whether pairs are adjacent."""

    cos_T1R: torch.Tensor
    sin_T1R: torch.Tensor
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True)
class HeadRules:
    """The steps from heads as they are projected to those that attend.

    Keys and values are absent where the layer does not store any (`stores`). Values are normalized
    without weights where `value_eps` is given.
    """

    norm: HeadNorm | None = None
    value_eps: float | None = None
    stores: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether a GPU has one kernel for all of it."""
        norm = self.norm
        is_plain = norm is None or (
            norm.kind == "rms" and not norm.is_joint and not norm.is_after_rotation
        )
        return is_plain and self.value_eps is None and self.stores


def rope_write(
    qkv_TXD: torch.Tensor,
    rules: HeadRules,
    rotation: Rotation | None,
    pages: KvPages,
    batch: AttentionBatch,
) -> torch.Tensor:
    """Normalize and rotate query and key heads, and write keys and values. Returns `q_THD`.

    `qkv_TXD` has the heads of queries, keys and values in that order. Keys and values are written
    in the type of `pages`.
    """
    num_kv_heads = pages.k_NPKD.shape[2] if rules.stores else 0
    qk_TXD, v_TKD = qkv_TXD.tensor_split((qkv_TXD.shape[1] - num_kv_heads,), dim=1)
    if qkv_TXD.is_cuda and rules.is_plain:
        return _on_gpu(qk_TXD, v_TKD, rules.norm, rotation, pages, batch)
    qk_TXD = _turned(qk_TXD, num_kv_heads, rules.norm, rotation)
    if not rules.stores:
        return qk_TXD
    if rules.value_eps is not None:
        weight_D = v_TKD.new_ones(v_TKD.shape[2])
        v_TKD = rms_norm(v_TKD, weight_D, rules.value_eps)
    q_THD, k_TKD = qk_TXD.tensor_split((-num_kv_heads,), dim=1)
    write_pages(k_TKD, v_TKD, pages, batch)
    return q_THD


def _on_gpu(
    qk_TXD: torch.Tensor,
    v_TKD: torch.Tensor,
    norm: HeadNorm | None,
    rotation: Rotation | None,
    pages: KvPages,
    batch: AttentionBatch,
) -> torch.Tensor:
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


def _turned(
    qk_TXD: torch.Tensor, num_kv_heads: int, norm: HeadNorm | None, rotation: Rotation | None
) -> torch.Tensor:
    """Normalize and rotate, in the order of the layer."""
    is_late = norm is not None and norm.is_after_rotation
    if norm is not None and not is_late:
        qk_TXD = _normed(qk_TXD, num_kv_heads, norm)
    if rotation is not None:
        qk_TXD = rotary(
            qk_TXD, rotation.cos_T1R, rotation.sin_T1R, is_interleaved=rotation.is_interleaved
        )
    return _normed(qk_TXD, num_kv_heads, norm) if norm is not None and is_late else qk_TXD


def _normed(qk_TXD: torch.Tensor, num_kv_heads: int, norm: HeadNorm) -> torch.Tensor:
    if norm.kind == "layer":
        return layer_norm(qk_TXD, norm.weight_XD, None, norm.eps)
    if not norm.is_joint:
        return rms_norm(qk_TXD, norm.weight_XD, norm.eps)
    places = (qk_TXD.shape[1] - num_kv_heads,)
    rows = zip(qk_TXD.tensor_split(places, dim=1), norm.weight_XD.tensor_split(places), strict=True)
    parts = [
        rms_norm(part.flatten(1), weight.flatten(), norm.eps).view_as(part) for part, weight in rows
    ]
    return torch.cat(parts, dim=1)
