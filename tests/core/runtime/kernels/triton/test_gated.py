"""The gates against torch's."""

from __future__ import annotations

import pytest
import torch

from support.kernel_device import on_device
from triptych.core.runtime.kernels.gated import Activation, SwigluClamp, gate_of
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
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
def test_equals_torch(activation: Activation, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    expected, tolerance = gate_of(activation)(x), TOLERANCES[dtype]
    torch.testing.assert_close(launch(x, activation), expected, rtol=tolerance, atol=tolerance)


def test_a_clamped_gate() -> None:
    x = torch.randn(3, 70, generator=torch.Generator().manual_seed(1)) * 4
    x[0, 0] = x[1, 40] = torch.nan
    expected = gate_of("silu", SwigluClamp(alpha=1.7, limit=3.0))(x)
    found = launch(x, "clamped_silu", 1.7, 3.0)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_large_gates_stay_finite(activation: Activation) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 3.0, 4.0]])
    assert launch(gate_up, activation).tolist() == [[0.0, 3e4, 0.0]]
