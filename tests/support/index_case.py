"""Tokens that choose keys by an index, with scores that no order of sums rounds: many are equal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from support.latent_case import CPU, LatentCase, LatentSizes, make_latents
from triptych.core.runtime.kernels.key_index import ChoiceRule, choose_keys
from triptych.core.runtime.kernels.kv_pages import LatentPages, write_cells
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.paged_attention import AttentionBatch

_STEP = 2.0**-5
"""All cells are multiples of it, the first one of each row 127: an int8 cell's scale is exact."""


@dataclass
class IndexCase:
    """`latents` are rows with a past, whose tokens choose by `q_THD` among the keys in `pages`."""

    latents: LatentCase
    q_THD: torch.Tensor
    weights_TH: torch.Tensor
    pages: LatentPages
    rule: ChoiceRule

    def choose(self, kernels: NativeKernels | None = None) -> AttentionBatch:
        batch = replace(self.latents.batch, native=kernels)
        return choose_keys(self.q_THD, self.weights_TH, self.pages, batch, self.rule)

    def chunk(self, row: int, first: int, last: int) -> IndexCase:
        """Some tokens of a row, in a step of their own."""
        start = int(self.latents.batch.query_starts_B[row])
        tokens = slice(start + first, start + last)
        own = replace(self, q_THD=self.q_THD[tokens], weights_TH=self.weights_TH[tokens])
        return replace(own, latents=self.latents.chunk(row, first, last))


def make_index(
    rows: list[tuple[int, int]],
    num_chosen: int,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    index: tuple[int, int] = (4, 8),
    sizes: LatentSizes = LatentSizes(3, 24, 16, 16),  # noqa: B008 - it is frozen
) -> IndexCase:
    """`rows` are (queries, context), `index` its heads and their size; unused keys are NaN."""
    latents = make_latents(rows, sizes, dtypes)
    generator = torch.Generator().manual_seed(1)
    (num_pages, page_size), (num_heads, head_dim) = latents.pages.k_NPKD.shape[:2], index
    pages = LatentPages.of_rows((num_pages, page_size, head_dim), 0, dtypes[1], CPU)
    keys = torch.randint(-3, 4, (num_pages * page_size, 1, head_dim), generator=generator).float()
    keys[..., 0] = 127
    unused = latents.pages.k_NPKD.float().isnan()[:, :, 0, 0].flatten()
    keys[unused] = torch.nan
    write_cells(keys * _STEP, pages.k_NPKD, pages.k_scale_NPK, torch.arange(len(keys)))
    shape = len(latents.q_THD), num_heads
    q_THD = torch.randint(-2, 3, (*shape, head_dim), generator=generator).to(dtypes[0])
    q_THD[..., 0] = 0
    weights_TH = torch.randint(-2, 3, shape, generator=generator).float()
    return IndexCase(latents, q_THD, weights_TH, pages, ChoiceRule(num_chosen, 0.125))


def chosen_slots(chosen: AttentionBatch) -> list[list[int]]:
    """The slots of each token, without what follows them."""
    lengths = chosen.context_lengths_B.tolist()
    return [row[:n].tolist() for row, n in zip(chosen.page_table_BM, lengths, strict=True)]
