"""Weights as they are stored, multiplied by the kernels of a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support.block_weights import random_blocks
from support.gpu_rehearsal import rehearse_gpu
from support.kernel_device import kernel_device
from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.core.runtime.kernels.packed_linear import Float8Weight, HeldWeight, Int4Weight, joined
from triptych.core.runtime.layers.linear import Linear

NUM_INPUTS, NUM_OUTPUTS = 128, 16
SEED = torch.Generator().manual_seed(5)


def int4(
    layout: str, *, has_zeros: bool, has_table: bool = False
) -> tuple[Int4Weight, torch.Tensor]:
    """Groups of 64 inputs, and the values."""
    from triptych.core.runtime.kernels.triton.gptq_linear import dequantize

    shape = (NUM_INPUTS, 2) if layout == "awq" else (NUM_INPUTS // 8, NUM_OUTPUTS)
    words, zeros = (
        torch.randint(-(2**31), 2**31, each, generator=SEED).int() for each in (shape, (2, 2))
    )
    scales_RO = (torch.rand(2, NUM_OUTPUTS, generator=SEED) * 0.01).half()
    table_I = torch.arange(NUM_INPUTS, dtype=torch.int32) % 2 if has_table else None
    weight = Int4Weight(words, scales_RO, zeros if has_zeros else None, table_I, layout)
    values_IO = dequantize(words, scales_RO, weight.zeros, table_I, layout)
    return weight, values_IO.t()


def float8(*scale: int) -> tuple[Float8Weight, torch.Tensor]:
    weight_OI = torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=SEED).to(torch.float8_e4m3fn)
    scales = 0.5 + torch.rand(scale, generator=SEED)
    return Float8Weight(weight_OI, scales), weight_OI.float() * scales.view(-1, 1)


def blocks(seed: int) -> tuple[PackedTensor, torch.Tensor]:
    packed = random_blocks("q4_0", NUM_OUTPUTS, NUM_INPUTS, seed=seed)
    return packed, packed.dequantize(torch.float32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: blocks(4),
        lambda: int4("gptq", has_zeros=True),
        lambda: int4("gptq_v2", has_zeros=False),
        lambda: int4("gptq", has_zeros=True, has_table=True),
        lambda: int4("awq", has_zeros=True),
        lambda: float8(1),
        lambda: float8(NUM_OUTPUTS),
    ],
)
def test_a_part_of_a_weight_is_that_of_its_values(
    make: Callable[[], tuple[HeldWeight, torch.Tensor]],
) -> None:
    weight, values_OI = make()
    for rows, inputs in ((slice(8, 16), slice(0, 128)), (slice(0, 16), slice(64, 128))):
        part = weight.part(rows, inputs)
        assert part.shape == (rows.stop - rows.start, inputs.stop - inputs.start)
        torch.testing.assert_close(values_of(part), values_OI[rows, inputs])


def test_squares_of_float8_and_words_are_not_cut() -> None:
    scales = torch.arange(6.0).view(2, 3)
    square = Float8Weight(torch.zeros(200, 300).to(torch.float8_e4m3fn), scales)
    part = square.part(slice(128, 200), slice(128, 300))
    assert part.shape == (72, 172)
    assert part.scale.tolist() == [[4.0, 5.0]]
    with pytest.raises(WeightsError, match="of size 128"):
        square.part(slice(0, 100), slice(0, 128))
    awq, _ = int4("awq", has_zeros=True)
    with pytest.raises(WeightsError, match="of size 8"):
        awq.part(slice(0, 4), slice(0, 128))
    with pytest.raises(WeightsError, match="of size 64"):
        awq.part(slice(0, 8), slice(0, 32))


def values_of(weight: HeldWeight) -> torch.Tensor:
    from triptych.core.runtime.kernels.triton.gptq_linear import dequantize

    if isinstance(weight, PackedTensor):
        return weight.dequantize(torch.float32)
    if isinstance(weight, Float8Weight):
        return weight.weight_OI.float() * weight.scale.view(-1, 1)
    held = weight.qweight, weight.scales_RO, weight.zeros, weight.group_of_input_I
    return dequantize(*held, weight.layout).t()


PARTS = {
    "blocks": (lambda: [blocks(1), blocks(2)], 1),
    "gptq": (lambda: [int4("gptq", has_zeros=True), int4("gptq", has_zeros=True)], 1),
    "symmetric": (lambda: [int4("gptq_v2", has_zeros=False)] * 2, 1),
    "awq": (lambda: [int4("awq", has_zeros=True), int4("awq", has_zeros=True)], 1),
    "groups in another order": (
        lambda: [int4("gptq", has_zeros=True, has_table=True), int4("gptq", has_zeros=True)],
        2,
    ),
    "float8": (lambda: [float8(1), float8(NUM_OUTPUTS)], 1),
    "kinds": (lambda: [float8(1), blocks(3), int4("awq", has_zeros=True)], 3),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_parts_are_one_projection(
    name: str, is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, num_products = PARTS[name]
    weights, values = zip(*make(), strict=True)
    held: list[HeldWeight | torch.Tensor] = list(weights)
    assert len(joined(held)) == num_products
    expected_OI = torch.cat(values)
    device, bias_O = kernel_device(), torch.randn(len(expected_OI), generator=SEED)
    linear = Linear(NUM_INPUTS, len(expected_OI), has_bias=True, dtype=torch.float32, device=device)
    assert linear.bias_O is not None
    linear.bias_O.copy_(bias_O)
    linear.is_deterministic = is_deterministic
    for part, weight in enumerate(weights):
        linear.hold(part * NUM_OUTPUTS, weight)
    linear.prepare()
    rehearse_gpu(monkeypatch)
    x_TI = torch.randn(3, NUM_INPUTS, generator=SEED)
    ones_TO = torch.ones(3, len(expected_OI), device=device)
    y_TO = linear(x_TI.to(device), ones_TO, torch.float32).cpu()
    error = y_TO - (x_TI @ expected_OI.T + bias_O + 1)
    has_rounded_rows = any(isinstance(each, Float8Weight) for each in weights)
    assert error.norm() < (0.05 if has_rounded_rows else 1e-3) * y_TO.norm()


def test_squares_are_joined_where_the_second_begins_with_one() -> None:
    def squares(num_outputs: int) -> Float8Weight:
        weight = torch.zeros(num_outputs, 256).to(torch.float8_e4m3fn)
        return Float8Weight(weight, torch.ones(-(-num_outputs // 128), 2))

    assert len(joined([squares(256), squares(100)])) == 1
    assert len(joined([squares(100), squares(256)])) == 2
