"""The experts of a layer on a GPU, interpreted: as they are stored, and as plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.block_weights import random_blocks
from support.gpu_rehearsal import rehearse_gpu
from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.core.runtime.kernels.gated import SwigluClamp
from triptych.core.runtime.kernels.packed_linear import Float8Weight, HeldWeight, Int4Weight
from triptych.core.runtime.kernels.routing import Routing
from triptych.core.runtime.kernels.stacked_weights import StackedWeight, stack_experts
from triptych.core.runtime.layers import moe as moe_module
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.moe import MoeConfig, MoeMlp

CPU = torch.device("cpu")
HIDDEN, FEATURES, EXPERTS = 64, 32, 3
CONFIG = MoeConfig(num_experts=EXPERTS, routing=Routing(num_chosen=2), intermediate_size=FEATURES)
SEED = torch.Generator().manual_seed(5)


@pytest.fixture(autouse=True)
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_module, "has_grouped_products", lambda device: True)
    monkeypatch.setattr(Linear, "takes_stored", True)


def new_mlp(config: MoeConfig = CONFIG) -> MoeMlp:
    mlp = MoeMlp(config, HIDDEN, "silu", dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(1)
    mlp.router.weight_OI.copy_(torch.randn(EXPERTS, HIDDEN, generator=generator))
    return mlp


def q8_0(num_outputs: int, num_inputs: int) -> PackedTensor:
    return random_blocks("q8_0", num_outputs, num_inputs, seed=num_inputs)


def mxfp4(num_outputs: int, num_inputs: int) -> PackedTensor:
    return random_blocks("mxfp4", num_outputs, num_inputs, seed=num_inputs)


def q4_0(num_outputs: int, num_inputs: int) -> PackedTensor:
    return random_blocks("q4_0", num_outputs, num_inputs, seed=num_inputs)


def awq(num_outputs: int, num_inputs: int) -> Int4Weight:
    shapes = (num_inputs, num_outputs // 8), (num_inputs // 32, num_outputs // 8)
    words, zeros = (torch.randint(-(2**31), 2**31, each, generator=SEED).int() for each in shapes)
    scales_RO = (torch.rand(num_inputs // 32, num_outputs, generator=SEED) * 0.05).half()
    return Int4Weight(words, scales_RO, zeros, None, "awq")


def float8(num_outputs: int, num_inputs: int) -> Float8Weight:
    weight_OI = torch.randn(num_outputs, num_inputs, generator=SEED).to(torch.float8_e4m3fn)
    return Float8Weight(weight_OI, torch.rand(1, generator=SEED) * 0.2 + 0.1)


def values_of(weight: HeldWeight) -> torch.Tensor:
    from triptych.core.runtime.kernels.triton.gptq_linear import dequantize

    if isinstance(weight, PackedTensor):
        return weight.dequantize(torch.float32)
    if isinstance(weight, Float8Weight):
        return weight.weight_OI.float() * weight.scale
    held = weight.qweight, weight.scales_RO, weight.zeros, None
    return dequantize(*held, weight.layout).t()


def parts_of(mlp: MoeMlp) -> list[tuple[Linear, int, tuple[int, int]]]:
    """Each tensor of a checkpoint: its projection, its first row and its shape."""
    rows = (0, FEATURES) if mlp.config.has_gate else (0,)
    return [
        part
        for expert in mlp.experts
        for part in (
            *((expert.gate_up, row, (FEATURES, HIDDEN)) for row in rows),
            (expert.down, 0, (HIDDEN, FEATURES)),
        )
    ]


@pytest.mark.parametrize("make", [q8_0, q4_0, awq, float8])
def test_stored_experts_give_what_their_values_give(
    make: Callable[[int, int], HeldWeight], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, plain = new_mlp(), new_mlp()
    for held, filled in zip(parts_of(stored), parts_of(plain), strict=True):
        (linear, first, shape), (other, *_) = held, filled
        weight = make(*shape)
        linear.hold(first, weight)
        other.weight_OI[first : first + shape[0]].copy_(values_of(weight))
    for mlp in (stored, plain):
        for linear in mlp.linears():
            linear.prepare()
    stored_bytes, plain_bytes = (
        sum(linear.num_bytes for expert in mlp.experts for linear in (expert.gate_up, expert.down))
        for mlp in (stored, plain)
    )
    assert plain_bytes == 4 * EXPERTS * 3 * FEATURES * HIDDEN
    assert stored_bytes < 0.4 * plain_bytes
    rehearse_gpu(monkeypatch)
    x_TC = torch.randn(5, HIDDEN, generator=SEED)
    y_TC, expected_TC = stored(x_TC, None), plain(x_TC, None)
    has_rounded_rows = make is float8
    error = (y_TC - expected_TC).norm() / expected_TC.norm()
    assert error < (0.1 if has_rounded_rows else 1e-5)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize(
    "rule",
    [
        {"has_expert_bias": True, "clamp": SwigluClamp(alpha=1.7, limit=0.5)},
        {"scales_inputs": True, "routing": Routing(num_chosen=2, scoring="sigmoid")},
        {"has_gate": False},
    ],
    ids=["gpt-oss", "llama-4", "nemotron-h"],
)
def test_a_gpu_computes_the_rules_of_a_cpu(
    rule: dict[str, Any], is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, mlps = replace(CONFIG, **rule), []
    for is_grouped in (True, False):
        monkeypatch.setattr(moe_module, "has_grouped_products", lambda device, g=is_grouped: g)
        mlp, generator = new_mlp(config), torch.Generator().manual_seed(2)
        for linear, first, shape in parts_of(mlp):
            weight = mxfp4(*shape)
            if is_packed:
                linear.hold(first, weight)
            else:
                rows = slice(first, first + shape[0])
                linear.weight_OI[rows] = weight.dequantize(torch.float32)
            if linear.bias_O is not None and not first:
                linear.bias_O.copy_(torch.randn(linear.bias_O.shape, generator=generator))
        for linear in mlp.linears():
            linear.prepare()
        mlps.append(mlp)
    x_TC = torch.randn(5, HIDDEN, generator=SEED)
    expected_TC = mlps[1](x_TC, None)
    rehearse_gpu(monkeypatch)
    torch.testing.assert_close(mlps[0](x_TC, None), expected_TC, rtol=1e-4, atol=1e-4)


def test_plain_rows_in_some_projections_are_a_kind_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of `down` may be too short for blocks."""
    stored, plain = new_mlp(), new_mlp()
    for held, filled in zip(parts_of(stored), parts_of(plain), strict=True):
        (linear, first, shape), (other, *_) = held, filled
        weight = q8_0(*shape)
        values_OI = weight.dequantize(torch.float32)
        if linear.num_inputs == FEATURES:
            linear.weight_OI.copy_(values_OI)
        else:
            linear.hold(first, weight)
        other.weight_OI[first : first + shape[0]].copy_(values_OI)
    rehearse_gpu(monkeypatch)
    x_TC = torch.randn(5, HIDDEN, generator=SEED)
    torch.testing.assert_close(stored(x_TC, None), plain(x_TC, None), rtol=1e-4, atol=1e-4)


def test_an_expert_maps_no_weight_of_its_own() -> None:
    expert = new_mlp().experts[0]
    assert not expert.down.map(torch.zeros(HIDDEN, FEATURES)), "steps read the tensor of all"


def test_experts_of_one_layer_must_be_alike() -> None:
    mlp = new_mlp()
    *parts, (linear, first, shape) = parts_of(mlp)
    for part, first_row, part_shape in parts:
        part.hold(first_row, q8_0(*part_shape))
    with pytest.raises(WeightsError, match="not all quantized alike"):
        linear.hold(first, q4_0(*shape))


def test_some_plain_experts_are_refused() -> None:
    mlp = new_mlp()
    (linear, first, shape), *_ = parts_of(mlp)
    linear.hold(first, q8_0(*shape))
    with pytest.raises(WeightsError, match="Some of a layer's experts"):
        linear.prepare()


def test_groups_in_the_order_of_activations_are_refused() -> None:
    table_I = torch.zeros(HIDDEN, dtype=torch.int32)
    weight = replace(awq(FEATURES, HIDDEN), group_of_input_I=table_I, zeros=None)
    with pytest.raises(WeightsError, match="desc_act"):
        stack_experts([[weight]], CPU)


def test_stored_weights_are_contiguous() -> None:
    mlp = new_mlp()
    for linear, first, shape in parts_of(mlp):
        linear.hold(first, awq(*shape))
    assert mlp._all is not None
    for weights in mlp._all:
        assert isinstance(weights.value, StackedWeight)
        assert weights.value.form == "gptq_v2"
        assert all(each.is_contiguous() for each in weights.value.tensors)
