"""The gates against torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support.kernel_device import on_device
from triptych.core.runtime.kernels.gated import gelu_and_mul, silu_and_mul
from triptych.core.runtime.kernels.triton import gated

# The interpreter's exponentials are numpy's, which warns where they end in infinity.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]
launch = on_device(gated.launch)
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("shape", [(1, 2), (3, 70), (2, 2 * 1025), (0, 16)])
@pytest.mark.parametrize(("reference", "is_gelu"), [(silu_and_mul, False), (gelu_and_mul, True)])
def test_equals_torch(
    reference: Callable[[torch.Tensor], torch.Tensor],
    is_gelu: bool,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(launch(x, is_gelu), reference(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_gelu", [False, True])
def test_large_gates_stay_finite(is_gelu: bool) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 3.0, 4.0]])
    assert launch(gate_up, is_gelu).tolist() == [[0.0, 3e4, 0.0]]
