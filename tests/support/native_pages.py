"""Pages in the order of the native kernels, from pages in the order of torch."""

from __future__ import annotations

import numpy as np
import torch

from triptych.core.kernels.native.library import NativeKernels
from triptych.core.kernels.paged_attention import AttentionBatch


def in_native_order(
    k_pages: torch.Tensor, v_pages: torch.Tensor, kernels: NativeKernels
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies that hold the same keys and values, cell by cell."""
    slots_T = torch.arange(k_pages.shape[0] * k_pages.shape[1])
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
    copies = torch.empty_like(k_pages), torch.empty_like(v_pages)
    kernels.write_pages(k_pages.flatten(0, 1), v_pages.flatten(0, 1), *copies, batch)
    return copies
