"""What tensors take once they are loaded."""

import pytest
import torch

from triptych.core.runtime.tensors.loading import TensorTarget


@pytest.mark.parametrize(("dtype", "num_bytes"), [(torch.float32, 10), (torch.int64, 40)])
def test_integers_are_counted_at_their_own_size(dtype: torch.dtype, num_bytes: int) -> None:
    assert TensorTarget("map", torch.zeros(5, dtype=dtype)).num_bytes(2) == num_bytes
