"""Pages of given values, in the order of torch and in that of the native kernels."""

from __future__ import annotations

import numpy as np
import torch

from triptych.core.runtime.kernels.kv_pages import KvPages, read_cells, write_cells
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.paged_attention import AttentionBatch


def pages_of(k_NPKD: torch.Tensor, v_NPKD: torch.Tensor, dtype: torch.dtype) -> KvPages:
    """These keys and values as cells of a type."""
    num_pages, page_size, num_kv_heads, head_dim = k_NPKD.shape
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    pages, slots = KvPages.empty(shape, dtype, k_NPKD.device), _slots(k_NPKD)
    write_cells(k_NPKD.flatten(0, 1), pages.k_NPKD, pages.k_scale_NPK, slots)
    write_cells(v_NPKD.flatten(0, 1), pages.v_NPKD, pages.v_scale_NPK, slots)
    return pages


def exactly(pages: KvPages) -> KvPages:
    """What the cells stand for, in float32."""
    slots, shape = _slots(pages.k_NPKD), pages.k_NPKD.shape
    return KvPages(
        read_cells(pages.k_NPKD, pages.k_scale_NPK, slots, torch.float32).view(shape),
        read_cells(pages.v_NPKD, pages.v_scale_NPK, slots, torch.float32).view(shape),
    )


def in_native_order(pages: KvPages, kernels: NativeKernels) -> KvPages:
    """Copies that hold the same keys and values, cell by cell."""
    slots_T = _slots(pages.k_NPKD)
    one = torch.zeros(1, dtype=torch.int64)
    batch = AttentionBatch(
        page_table_BM=one[:, None],
        context_lengths_B=one,
        query_starts_B=one,
        write_slots_T=slots_T,
        num_decode_rows=0,
        host_query_lengths_B=np.array([len(slots_T)]),
        host_context_lengths_B=np.array([len(slots_T)]),
    )
    copies = KvPages(*(None if each is None else torch.empty_like(each) for each in pages))
    values = exactly(pages)
    kernels.write_pages(values.k_NPKD.flatten(0, 1), values.v_NPKD.flatten(0, 1), copies, batch)
    return copies


def _slots(pages_NPKD: torch.Tensor) -> torch.Tensor:
    return torch.arange(pages_NPKD.shape[0] * pages_NPKD.shape[1])
