"""Rows with a past in pages, and attention over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from support.native_pages import exactly, in_native_order, pages_of
from triptych.core.runtime.kernels.kv_pages import KvPages
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.paged_attention import (
    AttentionBatch,
    AttentionRule,
    paged_attention,
)


@dataclass(frozen=True)
class PagedShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int


@dataclass
class PagedCase:
    q_THD: torch.Tensor
    pages: KvPages
    batch: AttentionBatch

    def run(self, kernels: NativeKernels | None, window: int | None = None) -> torch.Tensor:
        rule = AttentionRule(scale=self.q_THD.shape[2] ** -0.5, window=window)
        return self.attend(rule, kernels)

    def attend(self, rule: AttentionRule, kernels: NativeKernels | None = None) -> torch.Tensor:
        """By the reference, or by native kernels."""
        batch, pages = replace(self.batch, groups={}, native=kernels), self.pages
        if kernels is not None:
            pages = in_native_order(pages, kernels)
        return paged_attention(self.q_THD, pages, batch, rule)

    def exact(self) -> PagedCase:
        """In float32, over what the cells stand for."""
        return PagedCase(self.q_THD.float(), exactly(self.pages), self.batch)

    def row(self, index: int) -> PagedCase:
        """The same row in a step of its own."""
        first = int(self.batch.query_starts_B[index])
        length = int(self.batch.host_query_lengths_B[index])
        rows = slice(index, index + 1)
        batch = make_batch(
            self.batch.page_table_BM[rows], [length], [int(self.batch.context_lengths_B[index])]
        )
        return PagedCase(self.q_THD[first : first + length], self.pages, batch)


def make_batch(table_BM: torch.Tensor, lengths: list[int], contexts: list[int]) -> AttentionBatch:
    ends = np.cumsum(lengths)
    return AttentionBatch(
        page_table_BM=table_BM,
        context_lengths_B=torch.tensor(contexts),
        query_starts_B=torch.from_numpy(ends - lengths),
        write_slots_T=torch.empty(0, dtype=torch.int64),
        num_decode_rows=lengths.count(1),
        host_query_lengths_B=np.array(lengths),
        host_context_lengths_B=np.array(contexts),
    )


def make_case(
    rows: list[tuple[int, int]],
    shape: PagedShape,
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> PagedCase:
    """`rows` are (queries, context); `dtypes` of queries and cache. Unused cells are NaN."""
    generator = torch.Generator().manual_seed(seed)
    lengths, contexts = [n for n, _ in rows], [context for _, context in rows]
    num_pages = [-(-context // shape.page_size) for context in contexts]
    pages = torch.randperm(sum(num_pages), generator=generator).split(num_pages)
    table_BM = torch.full((len(rows), max(num_pages) + 1), 2**40)
    storage = (sum(num_pages) + 1, shape.page_size, shape.num_kv_heads, shape.head_dim)
    values_2NPKD = torch.full((2, *storage), torch.nan)
    values_2NPKD[:, -1] = 0
    for row, context in enumerate(contexts):
        table_BM[row, : num_pages[row]] = pages[row]
        offsets = torch.arange(shape.page_size)
        slots = (pages[row][:, None] * shape.page_size + offsets).flatten()[:context]
        for values_NPKD in values_2NPKD:
            values = torch.randn(context, *storage[2:], generator=generator)
            values_NPKD.flatten(0, 1)[slots] = values
    # A slice of a wider projection, as the model gives it.
    wide = torch.randn(sum(lengths), shape.num_heads + 3, shape.head_dim, generator=generator)
    q_THD = wide.to(dtypes[0])[:, : shape.num_heads]
    pages = pages_of(*values_2NPKD, dtypes[1])
    return PagedCase(q_THD, pages, make_batch(table_BM, lengths, contexts))
