"""A mixture in one native call against the same mixture in torch, on every instruction level."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.block_weights import random_blocks
from triptych.core.runtime.kernels.gated import SwigluClamp
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.routing import Routing
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.moe import MoeConfig, MoeMlp

CPU = torch.device("cpu")
HIDDEN, NUM_TOKENS = 96, 21
PLAIN = MoeConfig(num_experts=6, routing=Routing(num_chosen=2), intermediate_size=64)
GROUPS = Routing(
    num_chosen=3,
    scoring="sigmoid",
    scale=2.5,
    num_groups=4,
    num_chosen_groups=2,
    num_group_scores=2,
)
VARIANTS: dict[str, tuple[MoeConfig, str]] = {
    "softmax": (PLAIN, ""),
    "not renormalized": (replace(PLAIN, routing=Routing(num_chosen=3, renormalizes=False)), ""),
    "groups": (replace(PLAIN, num_experts=16, routing=GROUPS, has_correction=True), ""),
    "shared": (replace(PLAIN, shared_size=40), ""),
    "gated shared": (replace(PLAIN, shared_size=128, has_shared_gate=True), "q8_0"),
    "scaled inputs": (
        replace(PLAIN, routing=Routing(num_chosen=1, scoring="sigmoid"), scales_inputs=True),
        "",
    ),
    "clamped": (
        replace(
            PLAIN,
            has_router_bias=True,
            has_expert_bias=True,
            clamp=SwigluClamp(alpha=1.7, limit=0.4),
        ),
        "",
    ),
    "without gates": (replace(PLAIN, shared_size=40, has_gate=False), ""),
    "blocks": (replace(PLAIN, has_expert_bias=True), "q4_0"),
}


def new_mixture(variant: str, dtype: torch.dtype, kernels: NativeKernels) -> MoeMlp:
    config, form = VARIANTS[variant]
    moe = MoeMlp(config, HIDDEN, "silu", dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(3)

    def fill(values: torch.Tensor | None, std: float) -> None:
        if values is not None:
            values.copy_(torch.randn(values.shape, generator=generator) * std)

    def fill_expert(linear: Linear, seed: int) -> None:
        if form:
            linear.hold(0, random_blocks(form, linear.num_outputs, linear.num_inputs, seed=seed))
        else:
            fill(linear.weight_OI, 0.2)
        fill(linear.bias_O, 0.5)

    for linear in (moe.router, moe.shared_gate):
        if linear is not None:
            fill(linear.weight_OI, 0.3)
            fill(linear.bias_O, 0.5)
    fill(moe.correction_E, 0.5)
    for seed, expert in enumerate((*moe.experts, *((moe.shared,) if moe.shared else ()))):
        fill_expert(expert.gate_up, 2 * seed)
        fill_expert(expert.down, 2 * seed + 1)
    moe.prepare(kernels)
    return moe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_as_in_torch_and_each_row_bitwise_the_same_alone(
    kernels: NativeKernels, variant: str, dtype: torch.dtype
) -> None:
    moe = new_mixture(variant, dtype, kernels)
    generator = torch.Generator().manual_seed(4)
    x_TC, residual_TC = torch.randn(2, NUM_TOKENS, HIDDEN, generator=generator).to(dtype)
    fused = moe.fused
    assert fused is not None
    together = fused(x_TC, residual_TC)
    for row in (0, 7, NUM_TOKENS - 1):
        some = slice(row, row + 1)
        assert torch.equal(fused(x_TC[some], residual_TC[some]), together[some])
    few = fused(x_TC[3:8], None)
    assert torch.equal(fused(x_TC, None)[3:8], few)
    moe.fused = None
    tolerance = (
        {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.05}
    )
    torch.testing.assert_close(together, moe(x_TC, residual_TC), **tolerance)


def test_many_tokens_go_through_in_parts(kernels: NativeKernels) -> None:
    moe = new_mixture("shared", torch.float32, kernels)
    x_TC = torch.randn(1100, HIDDEN, generator=torch.Generator().manual_seed(5))
    assert moe.fused is not None
    together = moe.fused(x_TC, None)
    assert torch.equal(moe.fused(x_TC[1000:], None), together[1000:])
    assert torch.equal(moe.fused(x_TC[500:530], None), together[500:530])
