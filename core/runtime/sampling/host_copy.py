"""A small tensor on its way to the host, copied after the work that makes it.

Owns the pinned buffer and the event. Torch reuses a released buffer for the next copy, so none is
allocated in the long run. On a CPU the tensor itself is the copy.
"""

from __future__ import annotations

import torch


class HostCopy:
    """Starts the copy at once; `get` waits for it only, not for work launched since.

    It waits actively: after `core.runtime.devices.device.end_of_work` it returns at once.
    """

    __slots__ = ("_event", "_host")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def get(self) -> torch.Tensor:
        """Wait for the tensor on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
