"""Operations that are taken row by row give each row what it gets alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from triptych.core.runtime.layers.row_by_row import row_by_row

CPU = torch.device("cpu")
NUM_ROWS = 4
KERNEL_OIHW = torch.linspace(-1, 1, NUM_ROWS * 3 * 9).view(NUM_ROWS, 3, 3, 3)  # as many as rows
WEIGHT_OI = torch.linspace(-1, 1, 300 * 1536).view(300, 1536)


def attend(x: Tensor) -> Tensor:
    mask = torch.zeros(len(x), 1, 1, x.shape[2])
    mask[..., -3:] = -torch.inf
    y: Tensor = functional.scaled_dot_product_attention(x, key=x, value=x, attn_mask=mask)
    return y


def attend_alike(x: Tensor) -> Tensor:
    mask = torch.zeros(1, 1, 1, x.shape[2])
    y: Tensor = functional.scaled_dot_product_attention(x, x, x, mask, is_causal=False)
    return y


# Those of the first group depend on the batch today, on an AVX-512 machine with two threads.
CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "convolution": (lambda x: functional.conv2d(x, KERNEL_OIHW), (3, 32, 32)),
    "one row of a product": (lambda x: functional.linear(x, WEIGHT_OI), (1536,)),
    "sigmoid": (torch.sigmoid, (33, 200)),
    "its method": (Tensor.sigmoid, (5, 37)),
    "silu": (functional.silu, (5, 37)),
    "gelu": (lambda x: functional.gelu(input=x, approximate="tanh"), (33, 200)),
    "attention": (attend, (2, 40, 16)),
    "attention with a mask for all": (attend_alike, (2, 40, 16)),
    "a product with a matrix": (lambda x: x @ WEIGHT_OI.T, (7, 1536)),
    "a product of rows": (lambda x: torch.matmul(x, x.mT), (40, 16)),
    "tokens of a product": (lambda x: functional.linear(x, WEIGHT_OI), (5, 1536)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_each_row_is_as_it_is_alone(name: str, num_parts: int) -> None:
    compute, shape = CASES[name]
    random = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_ROWS * num_parts, *shape, generator=random)
    with row_by_row(NUM_ROWS, CPU):
        together = compute(x)
    torch.testing.assert_close(together, compute(x), atol=1e-3, rtol=1e-4)
    for row, part in enumerate(x.chunk(NUM_ROWS)):
        assert torch.equal(together.chunk(NUM_ROWS)[row], compute(part))


def test_input_without_rows_is_computed_directly() -> None:
    with row_by_row(NUM_ROWS, CPU):
        assert torch.sigmoid(torch.tensor(0.0)) == 0.5
        assert functional.silu(torch.zeros(3, 5)).shape == (3, 5)
        assert functional.linear(torch.zeros(0, 1536), WEIGHT_OI).shape == (0, 300)
        unbatched = functional.conv2d(torch.zeros(4, 8, 8), torch.zeros(2, 4, 3, 3))
        assert unbatched.shape == (2, 6, 6)
        x = torch.ones(4, 5)
        assert functional.silu(x, inplace=True) is x
