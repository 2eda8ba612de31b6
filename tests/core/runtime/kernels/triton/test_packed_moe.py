"""Experts whose weights are kept as they are stored, against their values in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import silu

from support.block_weights import random_blocks
from support.kernel_device import each_type, is_interpreted, on_device
from support.kernel_products import assert_near, random_rows, tolerance_of
from support.tiers import first
from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.core.runtime.kernels.packed_linear import Float8Weight, HeldWeight, Int4Weight
from triptych.core.runtime.kernels.stacked_weights import FLOAT8, StackedWeight, stack_experts
from triptych.core.runtime.kernels.triton import grouped_packed, moe
from triptych.core.runtime.kernels.triton.fp8_linear import (
    BLOCK,
    has_float8_units,
    round_rows,
)
from triptych.core.runtime.kernels.triton.gptq_linear import dequantize

pytestmark = pytest.mark.gpu
launch_packed_moe_mlp = on_device(moe.launch_packed_moe_mlp)
E = 3
SIZES = {"q4_k": (256, 256), "q6_k": (256, 256)}
CPU = torch.device("cpu")
SEED = torch.Generator().manual_seed(7)


def float8(num_outputs: int, num_inputs: int, *scale: int) -> Float8Weight:
    weight_OI = torch.randn(num_outputs, num_inputs, generator=SEED).to(torch.float8_e4m3fn)
    return Float8Weight(weight_OI, (torch.rand(scale, generator=SEED) + 0.5) * 0.05)


def one(num_outputs: int, num_inputs: int) -> Float8Weight:
    return float8(num_outputs, num_inputs, 1)


def outputs(num_outputs: int, num_inputs: int) -> Float8Weight:
    return float8(num_outputs, num_inputs, num_outputs)


def squares(num_outputs: int, num_inputs: int) -> Float8Weight:
    return float8(num_outputs, num_inputs, num_outputs // BLOCK, num_inputs // BLOCK)


def int4(layout: str, *, has_zeros: bool) -> Callable[[int, int], Int4Weight]:
    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=SEED).int()

    def make(num_outputs: int, num_inputs: int) -> Int4Weight:
        is_awq = layout == "awq"
        shape = (num_inputs, num_outputs // 8) if is_awq else (num_inputs // 8, num_outputs)
        scales_RO = torch.rand(num_inputs // 128, num_outputs, generator=SEED).half() * 0.01
        zeros = words(len(scales_RO), num_outputs // 8) if has_zeros else None
        return Int4Weight(words(*shape), scales_RO, zeros, None, layout)

    return make


def transposed(num_outputs: int, num_inputs: int) -> Int4Weight:
    """Words as compressed-tensors has them, which are a view of GPTQ's."""
    weight = int4("gptq_v2", has_zeros=False)(num_outputs, num_inputs)
    qweight, scales_RO = (x.t().contiguous().t() for x in (weight.qweight, weight.scales_RO))
    return Int4Weight(qweight, scales_RO, None, None, "gptq_v2")


def blocks(name: str) -> Callable[[int, int], PackedTensor]:
    def make(num_outputs: int, num_inputs: int) -> PackedTensor:
        seed = int(torch.randint(1000, (), generator=SEED))
        return random_blocks(name, num_outputs, num_inputs, seed=seed)

    return make


KINDS: dict[str, Callable[[int, int], HeldWeight]] = {
    "one": one,
    "outputs": outputs,
    "squares": squares,
    "gptq": int4("gptq", has_zeros=True),
    "symmetric": int4("gptq_v2", has_zeros=False),
    "transposed": transposed,
    "awq": int4("awq", has_zeros=True),
    **{name: blocks(name) for name in ("q8_0", "q4_0", "q5_1", "q4_k", "q6_k", "mxfp4")},
}


def values_of(weight: HeldWeight) -> torch.Tensor:
    if isinstance(weight, PackedTensor):
        return weight.dequantize(torch.float32)
    if isinstance(weight, Int4Weight):
        return dequantize(weight.qweight, weight.scales_RO, weight.zeros, None, weight.layout).t()
    scale = weight.scale
    if scale.dim() == 2:
        scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    else:
        scale = scale.view(-1, 1)
    return weight.weight_OI.float() * scale


class Layer:
    """Random experts of a kind, their values, and the result that a device should have."""

    def __init__(self, kind: str, down_kind: str | None = None) -> None:
        make, make_down = KINDS[kind], KINDS[down_kind or kind]
        num_inputs, num_hidden = self.sizes = SIZES.get(kind, (256, 128))
        gate_up = [[make(num_hidden, num_inputs) for _ in range(2)] for _ in range(E)]
        down = [[make_down(num_inputs, num_hidden)] for _ in range(E)]
        self.gate_up = stack_experts(gate_up, CPU)
        self.down = stack_experts(down, CPU)
        self.gate_up_values = [torch.cat([values_of(each) for each in parts]) for parts in gate_up]
        self.down_values = [values_of(parts[0]) for parts in down]

    def run(
        self, x_TI: torch.Tensor, weights_TC: torch.Tensor, experts_TC: torch.Tensor, *rest: bool
    ) -> torch.Tensor:
        stored = [(list(each.tensors), each.form) for each in (self.gate_up, self.down)]
        return launch_packed_moe_mlp(
            x_TI, *stored[0], *stored[1], weights_TC, experts_TC, "silu", *rest
        )

    def expected(
        self,
        x_TI: torch.Tensor,
        weights_TC: torch.Tensor,
        experts_TC: torch.Tensor,
        *,
        has_units: bool = True,
    ) -> torch.Tensor:
        out_TI = torch.zeros_like(x_TI, dtype=torch.float32)
        for token, (x_I, weights_C, experts_C) in enumerate(
            zip(x_TI, weights_TC, experts_TC.tolist(), strict=True)
        ):
            for weight, expert in zip(weights_C, experts_C, strict=True):
                gate_up = self._product(x_I, self.gate_up, self.gate_up_values[expert], has_units)
                gate, up = gate_up.chunk(2)
                hidden_F = (silu(gate) * up).to(x_TI.dtype)
                down_I = self._product(hidden_F, self.down, self.down_values[expert], has_units)
                out_TI[token] += weight * down_I.to(x_TI.dtype).float()
        return out_TI.to(x_TI.dtype)

    def _product(
        self, x_I: torch.Tensor, held: StackedWeight, values_OI: torch.Tensor, has_units: bool
    ) -> torch.Tensor:
        rows = x_I.float().unsqueeze(0)
        if held.form == FLOAT8 and has_units:
            has_blocks = held.tensors[1].dim() == 3
            rows = round_rows(rows, BLOCK if has_blocks else rows.shape[1])
        elif held.form != FLOAT8:
            values_OI = values_OI.to(x_I.dtype).float()
        return (rows @ values_OI.t())[0]


def routing(num_tokens: int, num_chosen: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    scores_TE = torch.randn(num_tokens, E, generator=generator)
    weights_TC, experts_TC = scores_TE.softmax(1).topk(num_chosen)
    return weights_TC.contiguous(), experts_TC.to(torch.int32).contiguous()


def has_units() -> bool:
    return is_interpreted() or has_float8_units(torch.device("cuda", 0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", first([19, 1]))
@pytest.mark.parametrize("dtype", each_type())
def test_is_the_weighted_sum_of_experts(kind: str, num_tokens: int, dtype: torch.dtype) -> None:
    layer, routed = Layer(kind), routing(num_tokens)
    num_inputs, num_hidden = layer.sizes
    x_TI = random_rows(num_tokens, num_inputs, dtype)
    assert layer.gate_up.shape == (E, 2 * num_hidden, num_inputs)
    assert layer.down.shape == (E, num_inputs, num_hidden)
    # Hidden values whose last bits differ may be rounded to neighbours in float8.
    tolerance = 2 * tolerance_of(dtype)
    tolerance = max(0.02, tolerance) if layer.gate_up.form == FLOAT8 else tolerance
    expected_TI = layer.expected(x_TI, *routed, has_units=has_units())
    assert_near(layer.run(x_TI, *routed), expected_TI, tolerance)


def test_gate_and_down_may_be_of_two_kinds() -> None:
    layer, routed, x_TI = Layer("q4_k", "q6_k"), routing(3), random_rows(3, 256)
    assert_near(layer.run(x_TI, *routed), layer.expected(x_TI, *routed))


@pytest.mark.parametrize("kind", ["outputs", "squares"])
def test_rows_stay_as_they_are_without_units(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_packed, "has_float8_units", lambda device: False)
    layer, routed, x_TI = Layer(kind), routing(5), random_rows(5, 256)
    expected_TI = layer.expected(x_TI, *routed, has_units=False)
    assert_near(layer.run(x_TI, *routed), expected_TI)


@pytest.mark.parametrize("kind", ["outputs", "gptq", "q4_k"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types(kind: str, dtype: torch.dtype) -> None:
    layer, routed, x_TI = Layer(kind), routing(3), random_rows(3, 256, dtype)
    expected_TI = layer.expected(x_TI, *routed, has_units=has_units())
    assert_near(layer.run(x_TI, *routed), expected_TI, 2 * tolerance_of(dtype))


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("kind", ["squares", "gptq"])
def test_in_deterministic_mode_a_token_does_not_depend_on_its_batch(kind: str) -> None:
    layer, x_TI = Layer(kind), random_rows(70, 256)
    weights_TC, experts_TC = routing(70)
    together = layer.run(x_TI, weights_TC, experts_TC, True)
    for row in (0, 33, 69):
        own = slice(row, row + 1)
        alone = layer.run(x_TI[own], weights_TC[own], experts_TC[own], True)
        assert torch.equal(alone[0], together[row])
