"""From the host to a device, without waiting for the work that the device has before it.

Owns how memory must lie for that. The way back is `core.runtime.sampling.host_copy`.
"""

from __future__ import annotations

import torch


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on `device`; the tensor itself where it is there already.

    A copy from memory that is not pinned waits for all that was launched before it. Torch keeps
    the pinned memory until it has been read.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def sent_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor in the type of another, where that one is."""
    return sent(tensor.to(like.dtype), like.device)
