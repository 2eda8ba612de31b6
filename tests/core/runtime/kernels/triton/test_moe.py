from __future__ import annotations

import pytest
import torch

from support.kernel_device import each_type, on_device
from support.kernel_products import assert_near, tolerance_of
from triptych.core.runtime.kernels.expert_products import ExpertRule, _arguments
from triptych.core.runtime.kernels.gated import Activation, SwigluClamp
from triptych.core.runtime.kernels.triton import moe
from triptych.core.runtime.kernels.triton.moe import reference

pytestmark = pytest.mark.gpu
launch_moe_mlp = on_device(moe.launch_moe_mlp)

Arguments = tuple[torch.Tensor, ...]
SILU = ExpertRule()


def random_layer(num_tokens: int, num_chosen: int, dtype: torch.dtype = torch.float32) -> Arguments:
    generator = torch.Generator().manual_seed(num_tokens)
    num_experts, num_features, num_hidden = 5, 72, 40

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    experts_TC = normal(num_tokens, num_experts).argsort(1)[:, :num_chosen].to(torch.int32)
    return (
        normal(num_tokens, num_features).to(dtype),
        (normal(num_experts, 2 * num_hidden, num_features) * 0.1).to(dtype),
        (normal(num_experts, num_features, num_hidden) * 0.1).to(dtype),
        normal(num_tokens, num_chosen).softmax(1),
        experts_TC.contiguous(),
    )


@pytest.mark.parametrize("num_tokens", [1, 3, 17])
@pytest.mark.parametrize("num_chosen", [1, 3])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", each_type())
def test_is_the_weighted_sum_of_experts(
    num_tokens: int, num_chosen: int, activation: Activation, dtype: torch.dtype
) -> None:
    layer, rule = random_layer(num_tokens, num_chosen, dtype), ExpertRule(activation=activation)
    out_TI = launch_moe_mlp(*layer, activation)
    assert_near(out_TI, reference(*layer, rule), tolerance_of(dtype))


def random_biases(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    gate_up, down = (torch.randn(5, size, generator=generator).to(dtype) for size in (80, 72))
    return {"gate_up_bias_EF": gate_up, "down_bias_EI": down}


@pytest.mark.parametrize("num_tokens", [1, 17])
@pytest.mark.parametrize("dtype", each_type())
def test_experts_with_biases_and_a_clamped_gate(num_tokens: int, dtype: torch.dtype) -> None:
    layer = random_layer(num_tokens, 3, dtype)
    rule = ExpertRule(clamp=SwigluClamp(alpha=1.7, limit=0.5), **random_biases(dtype))
    out_TI = launch_moe_mlp(*layer, *_arguments(rule, is_deterministic=False))
    assert_near(out_TI, reference(*layer, rule), tolerance_of(dtype))


@pytest.mark.parametrize("dtype", each_type())
def test_experts_without_a_gate(dtype: torch.dtype) -> None:
    x_TI, gate_up, *rest = random_layer(17, 2, dtype)
    layer = x_TI, gate_up[:, :40].contiguous(), *rest
    rule = ExpertRule(activation="relu2", has_gate=False)
    out_TI = launch_moe_mlp(*layer, *_arguments(rule, is_deterministic=False))
    assert_near(out_TI, reference(*layer, rule), tolerance_of(dtype))


@pytest.mark.parametrize("dtype", each_type())
def test_weights_of_inputs(dtype: torch.dtype) -> None:
    layer, rule = random_layer(17, 2, dtype), ExpertRule(scales_inputs=True)
    out_TI = launch_moe_mlp(*layer, *_arguments(rule, is_deterministic=False))
    assert_near(out_TI, reference(*layer, rule), tolerance_of(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types(dtype: torch.dtype) -> None:
    layer = random_layer(3, 2, dtype)
    out_TI = launch_moe_mlp(*layer, "silu")
    assert out_TI.dtype is dtype
    assert_near(out_TI, reference(*layer, SILU), tolerance_of(dtype))


def test_all_tokens_may_go_to_one_expert() -> None:
    x_TI, gate_up, down, weights_TC, experts_TC = random_layer(40, 1)
    layer = x_TI, gate_up, down, weights_TC, torch.full_like(experts_TC, 3)
    assert_near(launch_moe_mlp(*layer, "silu"), reference(*layer, SILU))


@pytest.mark.usefixtures("rows_alike")
def test_in_deterministic_mode_a_token_does_not_depend_on_its_batch() -> None:
    x_TI, gate_up, down, weights_TC, experts_TC = random_layer(70, 2)
    together = launch_moe_mlp(x_TI, gate_up, down, weights_TC, experts_TC, "silu", True)
    for row in (0, 33, 69):
        own = slice(row, row + 1)
        alone = launch_moe_mlp(
            x_TI[own], gate_up, down, weights_TC[own], experts_TC[own], "silu", True
        )
        assert torch.equal(alone[0], together[row])
