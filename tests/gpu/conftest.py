"""What tests of the device itself share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch


@pytest.fixture
def limit_memory(cuda: torch.device) -> Callable[[int], AbstractContextManager[None]]:
    """Lets this process have so many bytes more than it holds, inside a block."""

    @contextmanager
    def limited(num_bytes: int) -> Iterator[None]:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(cuda).total_memory
        fraction = (torch.cuda.memory_reserved(cuda) + num_bytes) / total
        torch.cuda.set_per_process_memory_fraction(fraction, cuda)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, cuda)

    return limited
