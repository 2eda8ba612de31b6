"""The operations of recurrent layers on a GPU against their references, states included."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from support.kernel_device import each_type, on_device
from support.tiers import first
from triptych.core.runtime.kernels.recurrent import (
    Convolution,
    DeltaInputs,
    GatedNorm,
    GateKind,
    NormPlace,
    ScanInputs,
    StateWave,
    convolve,
    gated_delta_rule,
    gated_norm,
    selective_scan,
)
from triptych.core.runtime.kernels.triton import delta_rule, short_conv
from triptych.core.runtime.kernels.triton import gated_norm as norm_kernel
from triptych.core.runtime.kernels.triton import selective_scan as scan

pytestmark = pytest.mark.gpu
launch_conv, launch_rule = on_device(short_conv.launch), on_device(delta_rule.launch)
launch_scan, launch_norm = on_device(scan.launch), on_device(norm_kernel.launch)
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
@pytest.mark.parametrize(
    ("key_dim", "value_dim", "num_decays"), [(16, 16, 1), (12, 40, 1), (12, 40, 12)]
)
def test_the_gated_delta_rule(
    dtype: torch.dtype, key_dim: int, value_dim: int, num_decays: int
) -> None:
    sizes = (2 * key_dim, 2 * key_dim, 4 * value_dim, 4 * num_decays, 4)
    q, k, v, a, b = random(40, sum(sizes), dtype=dtype).split(sizes, dim=1)
    inputs = DeltaInputs(
        *(q.unflatten(1, (2, -1)), k.unflatten(1, (2, -1)), v.unflatten(1, (4, -1))),
        *(a.unflatten(1, (4, -1)), b),
        decay_H=-random(4, seed=1).exp(),
        dt_bias_HA=random(4, num_decays, seed=2),
        beta_scale=2.0,
    )
    states: list[Any] = [random(5, 4, key_dim, value_dim, seed=3) for _ in range(2)]
    rows = wave()
    expected = gated_delta_rule(inputs, states[0], [rows])
    found = torch.empty_like(expected)
    launch_rule(
        *(inputs.q_TGD, inputs.k_TGD, inputs.v_THE, inputs.a_THA, inputs.b_TH),
        *(inputs.decay_H, inputs.dt_bias_HA, states[1], found),
        *(rows.starts_B, rows.lengths_B, rows.slots_B, inputs.beta_scale),
    )
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(states[1], states[0], atol=2e-5, rtol=2e-5)


def scan_inputs(head_dim: int, state_dim: int, dtype: torch.dtype) -> ScanInputs:
    """Four heads in two groups, as views of one projection's results."""
    sizes = (4 * head_dim, 2 * state_dim, 2 * state_dim, 4)
    x, b, c, dt = random(80, sum(sizes), dtype=dtype).split(sizes, dim=1)
    return ScanInputs(
        *(x.unflatten(1, (4, -1)), b.unflatten(1, (2, -1)), c.unflatten(1, (2, -1)), dt),
        decay_H=-random(4, seed=1).exp(),
        dt_bias_H=random(4, seed=2) * 3 - 3,
        skip_H=random(4, seed=4),
        limits=(0.01, 0.3),
    )


def scanned(
    inputs: ScanInputs, rows: StateWave, state: torch.Tensor, *, is_deterministic: bool
) -> torch.Tensor:
    found = torch.zeros_like(inputs.x_THP, dtype=torch.float32).contiguous()
    launch_scan(
        *(inputs.x_THP, inputs.b_TGN, inputs.c_TGN, inputs.dt_TH),
        *(inputs.decay_H, inputs.dt_bias_H, inputs.skip_H, list(inputs.limits), state, found),
        *(rows.starts_B, rows.lengths_B, rows.slots_B, rows.max_length, is_deterministic),
    )
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "state_dim"), first([(12, 40), (16, 16)]))
@pytest.mark.parametrize("is_deterministic", [True, False])
def test_mamba_2s_scan(
    dtype: torch.dtype, head_dim: int, state_dim: int, is_deterministic: bool
) -> None:
    """In blocks there are rows shorter than one, and one of several."""
    inputs = scan_inputs(head_dim, state_dim, dtype)
    starts_B, lengths_B = torch.tensor([[0, 1], [1, 2], [3, 77]]).t().contiguous()
    rows = StateWave(starts_B, lengths_B, torch.tensor([4, 0, 2]), max_length=77)
    states = [random(5, 4, head_dim, state_dim, seed=3) for _ in range(2)]
    expected = selective_scan(inputs, states[0], [rows])
    found = scanned(inputs, rows, states[1], is_deterministic=is_deterministic)
    is_rounded = dtype is torch.bfloat16 and not is_deterministic
    tolerance = 2e-4 if is_rounded else 2e-5
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states[1], states[0], atol=tolerance, rtol=tolerance)


def test_a_deterministic_scan_has_the_same_bits_in_any_chunks() -> None:
    inputs, slot = scan_inputs(16, 16, torch.float32), torch.tensor([1])
    results = []
    for cuts in ((0, 80), (0, 7, 48, 80)):
        state, found = random(2, 4, 16, 16, seed=3), []
        for start, stop in pairwise(cuts):
            length = torch.tensor([stop - start])
            rows = StateWave(torch.tensor([start]), length, slot, stop - start)
            found.append(scanned(inputs, rows, state, is_deterministic=True)[start:stop])
        results.append((torch.cat(found), state))
    for whole, cut in zip(*results, strict=True):
        assert torch.equal(whole, cut)


def test_small_steps_are_exact() -> None:
    """Softplus of a very negative number is its exponential."""
    inputs = replace(scan_inputs(16, 16, torch.float32), limits=(0.0, float("inf")))
    inputs = replace(inputs, dt_bias_H=torch.tensor([-14.0, -9.0, -3.0, 25.0]))
    rows = StateWave(torch.tensor([0]), torch.tensor([3]), torch.tensor([0]), max_length=3)
    states = [torch.zeros(1, 4, 16, 16) for _ in range(2)]
    selective_scan(inputs, states[0], [rows])
    scanned(inputs, rows, states[1], is_deterministic=False)
    torch.testing.assert_close(states[1], states[0], atol=1e-10, rtol=1e-5)


@pytest.mark.parametrize("dtype", each_type())
@pytest.mark.parametrize("place", ["first", "last", "none"])
@pytest.mark.parametrize("size", [20, 60])
def test_gated_norms(dtype: torch.dtype, place: NormPlace, size: int) -> None:
    """Of groups with a weight in common, and of whole tokens."""
    y_TO, z_TO = random(7, 60), random(7, 90, dtype=dtype, seed=1)[:, 20:80]
    weight = random(size, seed=2)
    gate: GateKind = "sigmoid" if size == 20 and place == "first" else "silu"
    norm = GatedNorm(weight=weight, size=size, eps=1e-3, place=place, gate=gate, gate_scale=0.7)
    expected = gated_norm(y_TO, z_TO, norm)
    found = launch_norm(y_TO, z_TO, weight, size, norm.eps, place, gate, norm.gate_scale)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_each_group_has_its_part_of_a_weight() -> None:
    y_TO, z_TO = random(3, 60), random(3, 60, seed=1)
    norm = GatedNorm(weight=random(60, seed=2), size=20, eps=1e-3, place="last")
    found = launch_norm(y_TO, z_TO, norm.weight, 20, norm.eps, "last")
    torch.testing.assert_close(found, gated_norm(y_TO, z_TO, norm), atol=1e-5, rtol=1e-5)
