"""Attention over rows of compressed keys and values, which all heads share.

Owns the operation and its write; the torch reference is that of `paged_attention`, which reads the
rows as keys of one head and their first values as its values. Knows no projection: queries arrive
in the space of the rows ("absorbed"), and results leave in it.

Latent attention: DeepSeek-V2, arXiv:2405.04434.

Shapes: T tokens, H query heads, D a row's values, V of them that are also the value, R the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triptych.core.runtime.kernels.kv_pages import LatentPages, write_cells
from triptych.core.runtime.kernels.paged_attention import AttentionBatch, AttentionRule, reference
from triptych.core.runtime.kernels.rms_norm import rms_norm
from triptych.core.runtime.kernels.rope_write import Rotation
from triptych.core.runtime.kernels.rotary import rotary


@dataclass(frozen=True, slots=True)
class RowRules:
    """The steps from a projection to a row: norm of its first values, rotation of the others."""

    norm_V: torch.Tensor
    eps: float
    rotation: Rotation

    def apply(self, rows_TD: torch.Tensor) -> torch.Tensor:
        """The rows as the cache has them, in torch."""
        latent_TV, key_TR = rows_TD.tensor_split((len(self.norm_V),), dim=1)
        turned = self.rotation
        key_T1R = rotary(
            key_TR.unsqueeze(1),
            turned.cos_T1R,
            turned.sin_T1R,
            is_interleaved=turned.is_interleaved,
        )
        normed_TV = rms_norm(latent_TV.contiguous(), self.norm_V, self.eps)
        return torch.cat((normed_TV, key_T1R.squeeze(1)), dim=1)


def write_latents(
    rows_TD: torch.Tensor,
    pages: LatentPages,
    batch: AttentionBatch,
    rules: RowRules | None = None,
) -> None:
    """Store this step's rows at `batch.write_slots_T`, as cells of the cache's type.

    `rules`, if given, are applied first.
    """
    assert rows_TD.shape[1] == pages.k_NPKD.shape[3]
    if rows_TD.is_cuda:
        _write_on_gpu(rows_TD, pages, batch, rules)
        return
    if rules is not None:
        rows_TD = rules.apply(rows_TD)
    if batch.native is not None:
        batch.native.write_latents(rows_TD, pages, batch)
    else:
        write_cells(rows_TD.unsqueeze(1), pages.k_NPKD, pages.k_scale_NPK, batch.write_slots_T)


def latent_attention(
    q_THD: torch.Tensor, pages: LatentPages, batch: AttentionBatch, rule: AttentionRule
) -> torch.Tensor:
    """Attention of every token over its row's latents, itself included: `out_THV`.

    The latents of this step must be written. Returns the type of `q_THD`. On a GPU, rules of more
    than a scale, and blocks, run in torch.
    """
    pages.check()
    assert q_THD.shape[2] == pages.k_NPKD.shape[3]
    if batch.native is not None:
        return batch.native.paged_attention(q_THD, pages, batch, rule)
    is_plain = rule.is_plain and rule.window is None and batch.blocks_2T is None
    if q_THD.is_cuda and is_plain:
        return _on_gpu(q_THD, pages, batch, rule.scale)
    return reference(q_THD, pages, batch, rule)


def _write_on_gpu(
    rows_TD: torch.Tensor, pages: LatentPages, batch: AttentionBatch, rules: RowRules | None
) -> None:
    from triptych.core.runtime.kernels.triton.latent_write import latent_write

    cached = (pages.k_NPKD, pages.k_scale_NPK, batch.write_slots_T)
    if rules is None:
        latent_write(rows_TD, None, 0.0, None, None, False, *cached)
        return
    turned = rules.rotation
    latent_write(
        *(rows_TD, rules.norm_V, rules.eps),
        *(turned.cos_T1R, turned.sin_T1R, turned.is_interleaved, *cached),
    )


def _on_gpu(
    q_THD: torch.Tensor, pages: LatentPages, batch: AttentionBatch, scale: float
) -> torch.Tensor:
    """Attend with one kernel for decode rows and one for prompt chunks; no value is read back."""
    from triptych.core.runtime.kernels.triton.float8 import as_stored
    from triptych.core.runtime.kernels.triton.latent_decode import latent_decode
    from triptych.core.runtime.kernels.triton.latent_prefill import latent_prefill

    num_decode, cached = batch.num_decode_rows, (as_stored(pages.k_NPKD), pages.k_scale_NPK)
    table_BM, lengths_B = batch.page_table_BM, batch.context_lengths_B
    out_THV = q_THD.new_empty(*q_THD.shape[:2], pages.v_NPKD.shape[3])
    if num_decode:
        rows = slice(num_decode)
        latent_decode(
            *(q_THD[rows], *cached, table_BM[rows], lengths_B[rows], out_THV[rows]),
            *(scale, batch.is_deterministic),
        )
    if len(batch.query_starts_B) > num_decode:
        rows = slice(num_decode, None)
        latent_prefill(
            *(q_THD[rows], *cached, table_BM[rows], lengths_B[rows]),
            *(batch.query_starts_B[rows], num_decode, out_THV[rows], scale),
        )
    return out_THV
