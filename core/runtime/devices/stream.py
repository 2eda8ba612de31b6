"""The stream that a model's steps are launched on.

Owns the order between a model's loading and its first step. Each model has its own stream, so that
steps of several models overlap on a GPU; a result that one step hands to another passes through the
host, or stays on one stream. An event at the end of a step marks when its results are ready
(`core.runtime.devices.device.end_of_work`, `core.runtime.sampling.host_copy`). On a CPU there are
no streams: a step is done when it is launched.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class StepStream:
    """A stream whose work starts after all that the current thread has launched on the device."""

    def __init__(self, device: torch.device, *, is_urgent: bool = False) -> None:
        """Work of urgent streams is scheduled before that of other streams."""
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1 if is_urgent else 0)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def current(self) -> AbstractContextManager[object]:
        """A block whose work goes to this stream and its device."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
