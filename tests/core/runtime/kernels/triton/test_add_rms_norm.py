"""The norm of a sum against torch's."""

from __future__ import annotations

import pytest
import torch

from support.kernel_device import is_interpreted, on_device
from triptych.core.runtime.kernels import rms_norm as reference
from triptych.core.runtime.kernels.triton import add_rms_norm as kernel

pytestmark = pytest.mark.gpu
launch_rms_norm = on_device(kernel.launch_rms_norm)
launch_add_rms_norm = on_device(kernel.launch_add_rms_norm)

# (tokens, features), activations, weight: float32 weights are the centred kind's.
CASES = [
    ((1, 64), torch.float32, torch.float32),
    ((3, 1), torch.float32, torch.float32),
    ((5, 100), torch.bfloat16, torch.bfloat16),
    ((2, 1537), torch.float16, torch.float16),
    ((3, 320), torch.bfloat16, torch.float32),
]
# Of the size of a value: two roundings of the type, at most.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-5


def inputs(
    shape: tuple[int, int], dtype: torch.dtype, weight: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(shape[1])
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    residual = torch.randn(shape, generator=generator).to(dtype)
    return x, residual, (1 + 0.1 * torch.randn(shape[1], generator=generator)).to(weight)


@pytest.mark.parametrize(("shape", "dtype", "weight_dtype"), CASES)
def test_equals_torch(
    shape: tuple[int, int], dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    x, residual, weight = inputs(shape, dtype, weight_dtype)
    tolerance = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    found = launch_rms_norm(x, weight, EPS)
    assert found.dtype is dtype
    torch.testing.assert_close(found, reference.rms_norm(x, weight, EPS), **tolerance)
    normed, total = launch_add_rms_norm(x, residual, weight, EPS)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, EPS)
    # The interpreter cuts bfloat16 off where a GPU rounds.
    is_cut = dtype is torch.bfloat16 and is_interpreted()
    bits = {"rtol": 2.0**-7 if is_cut else 0, "atol": 0}
    torch.testing.assert_close(total, expected_total, **bits)
    torch.testing.assert_close(normed, expected, **tolerance)


def test_takes_rows_apart_and_none_at_all() -> None:
    wide = torch.randn(4, 96)
    x, weight = wide[:, :64], torch.rand(64)
    expected = reference.rms_norm(x, weight, EPS)
    torch.testing.assert_close(launch_rms_norm(x, weight, EPS), expected)
    residual = wide[:, 32:]
    _, total = launch_add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert launch_rms_norm(x[:0], weight, EPS).shape == (0, 64)


def test_a_row_of_nan_stays_alone() -> None:
    x, weight = torch.randn(3, 40), torch.ones(40)
    alone = launch_rms_norm(x[2:], weight, EPS)
    x[1] = torch.nan
    found = launch_rms_norm(x, weight, EPS)
    assert found[1].isnan().all()
    assert torch.equal(found[2:], alone)
