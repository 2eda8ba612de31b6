"""Attention over rows of compressed keys and values, which all heads share.

Owns the operation and its write; the torch reference is that of `paged_attention`, which reads the
rows as keys of one head and their first values as its values. Knows no projection: queries arrive
in the space of the rows ("absorbed"), and results leave in it.

Latent attention: DeepSeek-V2, arXiv:2405.04434.

Shapes: T tokens, H query heads, D a row's values, V of them that are also the value.
"""

from __future__ import annotations

import torch

from triptych.core.runtime.kernels.kv_pages import LatentPages, write_cells
from triptych.core.runtime.kernels.paged_attention import AttentionBatch, AttentionRule, reference


def write_latents(rows_TD: torch.Tensor, pages: LatentPages, batch: AttentionBatch) -> None:
    """Store this step's rows at `batch.write_slots_T`, as cells of the cache's type."""
    assert rows_TD.shape[1] == pages.k_NPKD.shape[3]
    if batch.native is not None:
        batch.native.write_latents(rows_TD, pages, batch)
        return
    write_cells(rows_TD.unsqueeze(1), pages.k_NPKD, pages.k_scale_NPK, batch.write_slots_T)


def latent_attention(
    q_THD: torch.Tensor, pages: LatentPages, batch: AttentionBatch, rule: AttentionRule
) -> torch.Tensor:
    """Attention of every token over its row's latents, itself included: `out_THV`.

    The latents of this step must be written. Returns the type of `q_THD`.
    """
    pages.check()
    assert q_THD.shape[2] == pages.k_NPKD.shape[3]
    run = reference if batch.native is None else batch.native.paged_attention
    return run(q_THD, pages, batch, rule)
