"""The native bfloat16 projection against float32 torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.kernels.native.library import NativeKernels

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 70), st.integers(1, 50).map(lambda n: 2 * n))


@pytest.fixture(autouse=True)
def _needs_bf16_dot(native: NativeKernels) -> None:
    if not native.has_linear:
        pytest.skip("this processor leaves projections to oneDNN")


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, has_bias=st.booleans(), has_residual=st.booleans(), seed=st.integers(0, 99))
def test_agrees_with_torch_row_by_row(
    native: NativeKernels,
    sizes: tuple[int, int, int],
    has_bias: bool,
    has_residual: bool,
    seed: int,
) -> None:
    num_rows, num_outputs, num_inputs = sizes
    x_TI = random(num_rows, num_inputs, seed=seed)
    weight_OI = random(num_outputs, num_inputs, seed=seed + 1)
    bias_O = random(num_outputs, seed=seed + 2) if has_bias else None
    residual_TO = random(num_rows, num_outputs, seed=seed + 3) if has_residual else None
    expected = x_TI.float() @ weight_OI.float().T
    if bias_O is not None:
        expected += bias_O.float()
    if residual_TO is not None:
        expected += residual_TO.float()

    assert native.can_pack(weight_OI)
    packed = native.pack(weight_OI)
    y_TO = native.linear(x_TI, packed, num_outputs, bias_O, residual_TO)
    # One rounding to bfloat16, of half a unit in the eighth bit.
    torch.testing.assert_close(y_TO.float(), expected, atol=1e-4, rtol=2.0**-8)
    for row in range(num_rows):
        residual = None if residual_TO is None else residual_TO[row : row + 1]
        alone = native.linear(x_TI[row : row + 1], packed, num_outputs, bias_O, residual)
        assert torch.equal(alone[0], y_TO[row])


def test_what_it_does_not_pack(native: NativeKernels) -> None:
    assert not native.can_pack(torch.zeros(4, 4))
    assert not native.can_pack(torch.zeros(4, 3, dtype=torch.bfloat16))
    assert not native.can_pack(torch.zeros(4, 4, dtype=torch.bfloat16, device="meta"))
