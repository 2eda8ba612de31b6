"""The native norm and snake against float64 torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from triptych.core.runtime.kernels.native.library import NativeKernels

EPSILON = 1e-5


def reference(x_BCT: Tensor, gamma_BC: Tensor, beta_BC: Tensor, alpha_C: Tensor) -> Tensor:
    x_BCT, gamma_BC, beta_BC, alpha_C = (
        part.double() for part in (x_BCT, gamma_BC, beta_BC, alpha_C)
    )
    normed_BCT = torch.nn.functional.instance_norm(x_BCT, eps=EPSILON)
    y_BCT = (1 + gamma_BC[..., None]) * normed_BCT + beta_BC[..., None]
    return y_BCT + (alpha_C[:, None] * y_BCT).sin().square() / alpha_C[:, None]


def inputs(shape: tuple[int, int, int], seed: int, scale: float = 1.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    batch, channels, _ = shape
    return (
        scale * (torch.randn(shape, generator=generator) + 3),
        torch.randn(batch, channels, generator=generator),
        torch.randn(batch, channels, generator=generator),
        0.1 + 3 * torch.rand(channels, generator=generator),
    )


def rounding(x_BCT: Tensor, gamma_BC: Tensor) -> Tensor:
    """What rounding of a mean in float32 may weigh: much where samples lie close together."""
    x_BCT = x_BCT.double()
    spread_BC1 = (x_BCT.var(-1, correction=0, keepdim=True) + EPSILON).sqrt()
    largest_BC1 = x_BCT.abs().amax(-1, keepdim=True)
    return 2**-22 * (1 + gamma_BC[..., None]).abs() * largest_BC1 / spread_BC1


@settings(max_examples=80, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(2, 200)),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
@example(shape=(1, 1, 2), scale=1e4, seed=56)
def test_agrees_with_torch(
    native: NativeKernels, shape: tuple[int, int, int], scale: float, seed: int
) -> None:
    x_BCT, gamma_BC, beta_BC, alpha_C = inputs(shape, seed, scale)
    expected = reference(x_BCT, gamma_BC, beta_BC, alpha_C)
    y_BCT = native.styled_snake(
        x_BCT, (gamma_BC, beta_BC), alpha_C, eps=EPSILON, dtype=torch.float32
    )
    bound = 2e-4 + 2e-5 * expected.abs() + rounding(x_BCT, gamma_BC)
    assert bool(((y_BCT.double() - expected).abs() <= bound).all())
    short = native.styled_snake(
        x_BCT, (gamma_BC, beta_BC), alpha_C, eps=EPSILON, dtype=torch.bfloat16
    )
    assert torch.equal(short, y_BCT.bfloat16())


def test_a_row_depends_on_nothing_but_itself(native: NativeKernels) -> None:
    x_BCT, gamma_BC, beta_BC, alpha_C = inputs((3, 4, 77), 0)
    whole = native.styled_snake(
        x_BCT, (gamma_BC, beta_BC), alpha_C, eps=EPSILON, dtype=torch.float32
    )
    for item in range(3):
        rows = slice(item, item + 1)
        alone = native.styled_snake(
            x_BCT[rows],
            (gamma_BC[rows], beta_BC[rows]),
            alpha_C,
            eps=EPSILON,
            dtype=torch.float32,
        )
        assert torch.equal(alone, whole[rows])


def test_views_are_read_as_they_are_laid_out(native: NativeKernels) -> None:
    x_BCT, gamma_BC, beta_BC, alpha_C = inputs((2, 6, 40), 1)
    style_BC = torch.cat((gamma_BC, beta_BC), dim=1).chunk(2, dim=1)
    turned = x_BCT.transpose(1, 2).contiguous().transpose(1, 2)
    y_BCT = native.styled_snake(turned, style_BC, alpha_C, eps=EPSILON, dtype=torch.float32)
    expected = native.styled_snake(
        x_BCT, (gamma_BC, beta_BC), alpha_C, eps=EPSILON, dtype=torch.float32
    )
    assert torch.equal(y_BCT, expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(native: NativeKernels, bad: float) -> None:
    x_BCT, gamma_BC, beta_BC, alpha_C = inputs((1, 2, 40), 2)
    x_BCT[0, 1, 3] = bad
    y_BCT = native.styled_snake(
        x_BCT, (gamma_BC, beta_BC), alpha_C, eps=EPSILON, dtype=torch.float32
    )
    assert y_BCT[0, 0].isfinite().all()
    assert not y_BCT[0, 1].isfinite().any()
