"""Rows with a past of latents in pages, and attention over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from support.paged_case import make_batch
from triptych.core.runtime.kernels.kv_pages import LatentPages, read_cells, write_cells
from triptych.core.runtime.kernels.latent_attention import latent_attention
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.paged_attention import AttentionBatch, AttentionRule

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LatentSizes:
    num_heads: int
    row_dim: int
    value_dim: int
    page_size: int


@dataclass
class LatentCase:
    q_THD: torch.Tensor
    pages: LatentPages
    batch: AttentionBatch
    scale: float = 0.25

    def run(self, kernels: NativeKernels | None = None) -> torch.Tensor:
        batch = replace(self.batch, groups={}, native=kernels)
        rule = AttentionRule(scale=self.scale)
        return latent_attention(self.q_THD, self.pages, batch, rule)

    def exact(self) -> LatentCase:
        """In float32, over what the cells stand for."""
        rows_NPKD = self.pages.k_NPKD
        slots = torch.arange(rows_NPKD.shape[0] * rows_NPKD.shape[1])
        shape = rows_NPKD.shape[0], rows_NPKD.shape[1], rows_NPKD.shape[3]
        pages = LatentPages.of_rows(shape, self.pages.v_NPKD.shape[3], torch.float32, CPU)
        values = read_cells(rows_NPKD, self.pages.k_scale_NPK, slots, torch.float32)
        pages.k_NPKD.copy_(values.view(rows_NPKD.shape))
        return replace(self, q_THD=self.q_THD.float(), pages=pages)

    def chunk(self, row: int, first: int, last: int) -> LatentCase:
        """Some tokens of a row's queries, in a step of their own."""
        start = int(self.batch.query_starts_B[row])
        num_later = int(self.batch.host_query_lengths_B[row]) - last
        context = int(self.batch.context_lengths_B[row]) - num_later
        table_BM = self.batch.page_table_BM[row : row + 1]
        batch = make_batch(table_BM, [last - first], [context])
        return replace(self, q_THD=self.q_THD[start + first : start + last], batch=batch)


def make_latents(
    rows: list[tuple[int, int]],
    sizes: LatentSizes,
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int = 0,
) -> LatentCase:
    """`rows` are (queries, context); `dtypes` of queries and cache. Unused cells are NaN."""
    generator = torch.Generator().manual_seed(seed)
    lengths, contexts = [n for n, _ in rows], [context for _, context in rows]
    num_pages = [-(-context // sizes.page_size) for context in contexts]
    owned = torch.randperm(sum(num_pages), generator=generator).split(num_pages)
    table_BM = torch.full((len(rows), max(num_pages) + 1), 2**40)
    shape = sum(num_pages) + 1, sizes.page_size, sizes.row_dim
    pages = LatentPages.of_rows(shape, sizes.value_dim, dtypes[1], CPU)
    values = torch.full((shape[0] * shape[1], 1, sizes.row_dim), torch.nan)
    values[-sizes.page_size :] = 0
    for row, context in enumerate(contexts):
        table_BM[row, : num_pages[row]] = owned[row]
        slots = (owned[row][:, None] * sizes.page_size + torch.arange(sizes.page_size)).flatten()
        values[slots[:context]] = torch.randn(context, 1, sizes.row_dim, generator=generator)
    write_cells(values, pages.k_NPKD, pages.k_scale_NPK, torch.arange(len(values)))
    q_THD = torch.randn(sum(lengths), sizes.num_heads, sizes.row_dim, generator=generator)
    return LatentCase(q_THD.to(dtypes[0]), pages, make_batch(table_BM, lengths, contexts))
