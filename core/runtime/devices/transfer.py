"""Copies from the host to a device that do not wait for earlier work of the device.

Owns the kind of host memory that this needs. Copies to the host are
`core.runtime.sampling.host_copy`.
"""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to `device`; returns the tensor itself if it is there already.

    A copy from memory that is not pinned would wait for all work launched before it. Torch keeps
    the pinned memory until it has been read.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_device_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the device of another, in its type."""
    return to_device(tensor.to(like.dtype), like.device)
