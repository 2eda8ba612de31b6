"""The order in which torch tries its attention kernels, for other libraries' models.

Owns the order. Knows no model.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_ON_GPU = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
"""By speed on long sequences without a mask. Torch passes over one that cannot take the inputs."""


def fastest_attention(device: torch.device) -> AbstractContextManager[object]:
    """Inside, `scaled_dot_product_attention` uses the fastest kernel that takes its inputs.

    Torch has this order for the whole process. All kernels stay allowed, so that attention in
    other threads is never refused.
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel(list(_ON_GPU), set_priority=True)
