"""Convolutions and the gated delta rule on a GPU against their references, states included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.kernel_device import each_type, on_device
from triptych.core.runtime.kernels.recurrent import (
    Convolution,
    DeltaInputs,
    StateWave,
    convolve,
    gated_delta_rule,
)
from triptych.core.runtime.kernels.triton import delta_rule, short_conv

pytestmark = pytest.mark.gpu
launch_conv, launch_rule = on_device(short_conv.launch), on_device(delta_rule.launch)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def wave() -> StateWave:
    """A decode row, one shorter than a convolution, and one of several programs."""
    rows = torch.tensor([[0, 1, 4], [1, 2, 0], [3, 37, 2]]).t().contiguous()
    return StateWave(*rows, max_length=37)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", each_type())
@pytest.mark.parametrize(("width", "has_bias"), [(4, False), (3, True), (7, True)])
def test_convolutions(dtype: torch.dtype, width: int, has_bias: bool) -> None:
    wide, by = random(40, 300, dtype=dtype), Convolution(random(width, 260, seed=1))
    if has_bias:
        by = Convolution(by.weight_KX, random(260, seed=2), activates=False)
    x, rows = wide[:, 20:280], wave()
    states = [random(5, width - 1, 260, seed=3) for _ in range(2)]
    expected = convolve(x, by, states[0], [rows])
    found = torch.empty_like(expected)
    launch_conv(
        *(x, by.weight_KX, by.bias_X, by.activates, states[1], found),
        *(rows.starts_B, rows.lengths_B, rows.slots_B, rows.max_length),
    )
    torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    torch.testing.assert_close(states[1], states[0], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", each_type())
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (12, 40)])
def test_the_gated_delta_rule(dtype: torch.dtype, key_dim: int, value_dim: int) -> None:
    sizes = (2 * key_dim, 2 * key_dim, 4 * value_dim, 4, 4)
    q, k, v, a, b = random(40, sum(sizes), dtype=dtype).split(sizes, dim=1)
    inputs = DeltaInputs(
        *(q.unflatten(1, (2, -1)), k.unflatten(1, (2, -1)), v.unflatten(1, (4, -1)), a, b),
        decay_H=-random(4, seed=1).exp(),
        dt_bias_H=random(4, seed=2),
    )
    states: list[Any] = [random(5, 4, key_dim, value_dim, seed=3) for _ in range(2)]
    rows = wave()
    expected = gated_delta_rule(inputs, states[0], [rows])
    found = torch.empty_like(expected)
    launch_rule(
        *(inputs.q_TGD, inputs.k_TGD, inputs.v_THE, inputs.a_TH, inputs.b_TH),
        *(inputs.decay_H, inputs.dt_bias_H, states[1], found),
        *(rows.starts_B, rows.lengths_B, rows.slots_B),
    )
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(states[1], states[0], atol=2e-5, rtol=2e-5)
