"""What the tests of products on a GPU share.

Under Triton's interpreter, a cast to bfloat16 cuts off where a device rounds.
"""

from __future__ import annotations

import torch

from support.kernel_device import is_interpreted


def random_rows(num_rows: int, num_inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, num_inputs, generator=generator).to(dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal within `tolerance` times the largest value: sums of many products cancel."""
    assert actual.dtype == expected.dtype
    largest = float(expected.float().abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * largest)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in all bits; but for the last on a device, whose compiler makes one rounding of two."""
    assert_near(actual, expected, 0 if is_interpreted() else 2**-22)


def tolerance_of(dtype: torch.dtype) -> float:
    """Of sums whose operands and results were rounded, or cut off, to a type."""
    return {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
