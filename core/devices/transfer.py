"""From the host to a device, without waiting for the work that the device has before it.

Owns how memory must lie for that. The way back is `core.sampling.host_copy`.
"""

from __future__ import annotations

import torch


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small tensor of the host's on `device`; on a CPU the tensor itself.

    A copy from memory that is not pinned waits for all that was launched before it. Torch keeps
    the pinned memory until it has been read.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
