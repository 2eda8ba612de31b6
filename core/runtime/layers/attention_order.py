"""The order in which torch tries its attention kernels, for other libraries' models.

Owns the orders, and which of them image models have. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

TORCHS_OWN: Sequence[SDPBackend] = ()
"""The order that torch has for the device and the inputs."""
CUDNN_FIRST: Sequence[SDPBackend] = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
"""By the speed that is expected on Hopper of long sequences without a mask."""
FOR_IMAGES = TORCHS_OWN
"""The order for image models; `samples/gpu/images.py` measures both."""


def attention_order(
    device: torch.device, order: Sequence[SDPBackend] = FOR_IMAGES
) -> AbstractContextManager[object]:
    """Inside, `scaled_dot_product_attention` uses the first kernel of a GPU that takes its inputs.

    Torch has one order for the whole process. An order has all kernels, so that attention in other
    threads is never refused.
    """
    if device.type != "cuda" or not order:
        return nullcontext()
    return sdpa_kernel(list(order), set_priority=True)
