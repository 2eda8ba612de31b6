"""GELU quantized to rows of a float8 product, against one operation after the other."""

from __future__ import annotations

import pytest
import torch

from support.kernel_device import on_device
from triptych.core.runtime.kernels.gelu_rows import quantize_gelu_rows
from triptych.core.runtime.kernels.triton import gelu_rows

pytestmark = pytest.mark.gpu

launch = on_device(gelu_rows.launch)


def random_parts(num_left: int, num_features: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Parts of wider tensors."""
    generator = torch.Generator().manual_seed(num_features)
    x_TF = torch.randn(5, num_features + 16, generator=generator)[:, :num_features] * 1.5
    left_TN = torch.randn(5, num_left + 8, generator=generator)[:, :num_left]
    return x_TF, left_TN if num_left else None


@pytest.mark.parametrize(
    ("num_left", "num_features"), [(0, 48), (16, 4096), (3072, 2064), (32, 16)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torch(num_left: int, num_features: int, dtype: torch.dtype) -> None:
    x_TF, left_TN = random_parts(num_left, num_features)
    x_TF, left_TN = x_TF.to(dtype), None if left_TN is None else left_TN.to(dtype)
    quantized_TI, scale_T1 = launch(x_TF, left_TN)
    expected_TI, expected_T1 = quantize_gelu_rows(x_TF, left_TN)
    assert quantized_TI.shape == (5, num_left + num_features)
    torch.testing.assert_close(scale_T1, expected_T1, rtol=1e-5, atol=0)
    # Values at the middle of two float8 numbers may round to either: one place of four bits.
    found, expected = quantized_TI.float(), expected_TI.float()
    torch.testing.assert_close(found, expected, rtol=0.13, atol=2**-9)
    assert (found != expected).float().mean() < 0.005


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rows_of_zeros_and_values_that_are_not_finite() -> None:
    x_TF = torch.zeros(3, 32)
    x_TF[1, 3], x_TF[2, 5] = torch.nan, torch.inf
    quantized_TI, scale_T1 = launch(x_TF)
    assert quantized_TI[0].float().count_nonzero() == 0
    assert scale_T1[0] == 1
    assert scale_T1[1:].isnan().all()
    torch.testing.assert_close(quantize_gelu_rows(x_TF)[1], scale_T1, equal_nan=True)
