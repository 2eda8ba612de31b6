"""The choice between the products of experts, and the library's against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from support.kernel_products import assert_near, random_rows, tolerance_of
from triptych.core.runtime.kernels import expert_products
from triptych.core.runtime.kernels.expert_products import (
    MIN_EXPERT_ROWS,
    ExpertRule,
    library_moe,
    moe_product,
    prefers_library,
    takes_grouped,
)
from triptych.core.runtime.kernels.gated import SwigluClamp
from triptych.core.runtime.kernels.triton import moe

SILU = ExpertRule()
BF16 = torch.bfloat16
NUM_EXPERTS, FEATURES, HIDDEN = 4, 64, 48


def random_experts() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (NUM_EXPERTS, 2 * HIDDEN, FEATURES), (NUM_EXPERTS, FEATURES, HIDDEN)
    gate_up, down = ((torch.randn(each, generator=generator) * 0.1).to(BF16) for each in shapes)
    return gate_up, down


def routing(num_tokens: int, num_experts: int = NUM_EXPERTS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    weights_TC, experts_TC = torch.randn(num_tokens, num_experts, generator=generator).topk(2)
    return weights_TC.softmax(1), experts_TC.to(torch.int32)


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize(
    "rule",
    [
        SILU,
        ExpertRule(activation="gelu_tanh"),
        ExpertRule(scales_inputs=True),
        ExpertRule(
            clamp=SwigluClamp(alpha=1.7, limit=0.5),
            gate_up_bias_EF=random_rows(NUM_EXPERTS, 2 * HIDDEN, BF16),
            down_bias_EI=random_rows(NUM_EXPERTS, FEATURES, BF16),
        ),
    ],
    ids=["silu", "gelu", "inputs", "gpt-oss"],
)
@pytest.mark.parametrize("num_used", [2, NUM_EXPERTS])
def test_the_librarys_is_the_weighted_sum_of_experts(
    num_tokens: int, rule: ExpertRule, num_used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's own product of groups on a CPU; some experts may have no rows."""
    monkeypatch.setattr(moe, "combine", moe.launch_combine)
    x_TI, experts = random_rows(num_tokens, FEATURES, BF16), random_experts()
    routed = routing(num_tokens, num_used)
    y_TI = library_moe(x_TI, *experts, *routed, rule)
    assert y_TI.dtype is BF16
    expected_TI = moe.reference(x_TI, *experts, *routed, rule)
    assert_near(y_TI, expected_TI, 2 * tolerance_of(BF16))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 33, 1000])
@pytest.mark.parametrize("num_used", [2, NUM_EXPERTS])
def test_the_librarys_is_ours_on_a_device(
    num_tokens: int, num_used: int, cuda: torch.device
) -> None:
    x_TI = random_rows(num_tokens, FEATURES, BF16)
    experts, routed = random_experts(), routing(num_tokens, num_used)
    expected_TI = moe.reference(x_TI, *experts, *routed, SILU)
    arguments = [each.to(cuda) for each in (x_TI, *experts, *routed)]
    if not takes_grouped(arguments[2]):
        pytest.skip("the library has no such product on this device")
    assert_near(library_moe(*arguments, SILU).cpu(), expected_TI, 2 * tolerance_of(BF16))
    assert_near(moe.moe_mlp(*arguments, "silu").cpu(), expected_TI, 2 * tolerance_of(BF16))


def test_nothing_is_read_back() -> None:
    with FakeTensorMode():
        x_TI = torch.empty(40, FEATURES, dtype=BF16, device="cuda")
        gate_up = torch.empty(NUM_EXPERTS, 2 * HIDDEN, FEATURES, dtype=BF16, device="cuda")
        down = torch.empty(NUM_EXPERTS, FEATURES, HIDDEN, dtype=BF16, device="cuda")
        weights_TC = torch.empty(40, 2, device="cuda")
        experts_TC = torch.empty(40, 2, dtype=torch.int32, device="cuda")
        y_TI = library_moe(x_TI, gate_up, down, weights_TC, experts_TC, SILU)
    assert (y_TI.shape, y_TI.dtype, y_TI.device.type) == ((40, FEATURES), BF16, "cuda")


@pytest.mark.parametrize(
    ("capability", "dtype", "hidden", "is_taken"),
    [
        ((9, 0), BF16, 48, True),
        ((10, 0), BF16, 48, True),
        ((8, 9), BF16, 48, False),
        ((12, 0), BF16, 48, False),
        (None, BF16, 48, False),
        ((9, 0), torch.float16, 48, False),
        ((9, 0), BF16, 44, False),
    ],
)
def test_what_the_library_takes(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    hidden: int,
    is_taken: bool,
) -> None:
    monkeypatch.setattr(expert_products, "cuda_capability", lambda device: capability)
    assert takes_grouped(torch.empty(NUM_EXPERTS, FEATURES, hidden, dtype=dtype)) is is_taken


def test_experts_need_rows_enough_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_products, "cuda_capability", lambda device: (9, 0))
    _, down = random_experts()
    for num_pairs, is_preferred in (
        (MIN_EXPERT_ROWS * NUM_EXPERTS, True),
        (MIN_EXPERT_ROWS * NUM_EXPERTS - 2, False),
    ):
        experts_TC = torch.zeros(num_pairs // 2, 2, dtype=torch.int32)
        x_TI = torch.empty(num_pairs // 2, FEATURES, dtype=BF16)
        assert prefers_library(x_TI, down, experts_TC) is is_preferred


def test_deterministic_products_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def note(name: str) -> Any:
        return lambda x_TI, *rest: called.append(name) or x_TI

    monkeypatch.setattr(expert_products, "cuda_capability", lambda device: (9, 0))
    monkeypatch.setattr(expert_products, "library_moe", note("library"))
    monkeypatch.setattr(moe, "moe_mlp", note("ours"))
    num_tokens = MIN_EXPERT_ROWS * NUM_EXPERTS // 2
    x_TI, experts = torch.empty(num_tokens, FEATURES, dtype=BF16), random_experts()
    routed = routing(num_tokens)
    moe_product(x_TI, *experts, routed, SILU, is_deterministic=True)
    moe_product(x_TI, *experts, routed, SILU, is_deterministic=False)
    fewer = routed[0][1:], routed[1][1:]
    moe_product(x_TI[1:], *experts, fewer, SILU, is_deterministic=False)
    assert called == ["ours", "library", "ours"]
