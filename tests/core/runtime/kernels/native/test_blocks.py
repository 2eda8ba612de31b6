"""Products with weights in blocks of integers, on every instruction level."""

import pytest
import torch

from support.block_weights import random_blocks
from triptych.core.block_formats import FORMATS
from triptych.core.runtime.kernels.native.library import NativeKernels

NUM_INPUTS = 512
ROW_COUNTS = (3, 7, 13, 70)


def activations(num_rows: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, num_inputs, generator=generator).to(dtype)


def quantized(x_TI: torch.Tensor, steps: int) -> torch.Tensor:
    """Each 32 inputs as multiples of a `steps`-th, up to 127, times a scale."""
    blocks = x_TI.float().unflatten(1, (-1, 32))
    most = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(most, 127.0) / most  # 127.0 / most is rounded twice
    scaled = (blocks * inverse).nan_to_num()
    codes = scaled.round()
    codes += ((scaled - codes) * steps).round() / steps
    return (codes.double() * (most / 127.0)).flatten(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_exact_but_for_the_quantized_inputs(
    kernels: NativeKernels, name: str, dtype: torch.dtype
) -> None:
    """And each row's result is bitwise that of the row alone."""
    weight = random_blocks(name, 45, NUM_INPUTS, seed=1)
    values_OI = weight.dequantize(torch.float32).double()
    packed = kernels.pack(weight)
    steps = 128 if name == "q8_0" else 1
    for num_rows in ROW_COUNTS:
        x_TI = activations(num_rows, NUM_INPUTS, dtype)
        y_TO = kernels.linear(x_TI, packed, out_dtype=torch.float32)
        torch.testing.assert_close(
            y_TO.double(), quantized(x_TI, steps) @ values_OI.T, atol=2e-4, rtol=1e-4
        )
        for row in {0, 1, 11, num_rows // 2, num_rows - 1} & {*range(num_rows)}:
            alone = kernels.linear(x_TI[row : row + 1], packed, out_dtype=torch.float32)
            assert torch.equal(alone[0], y_TO[row])


@pytest.mark.parametrize("name", FORMATS)
def test_close_to_the_plain_product(kernels: NativeKernels, name: str) -> None:
    """Inputs of 8 bits with a scale for 32 of them cost less than a hundredth; weights of 8 bits
    meet inputs of 15."""
    weight = random_blocks(name, 64, NUM_INPUTS, seed=2)
    x_TI = activations(8, NUM_INPUTS, torch.float32)
    expected = x_TI @ weight.dequantize(torch.float32).T
    error = kernels.linear(x_TI, kernels.pack(weight)) - expected
    assert error.norm() < (1e-4 if name == "q8_0" else 0.01) * expected.norm()


@pytest.mark.parametrize("name", FORMATS)
def test_rows_come_back(kernels: NativeKernels, name: str) -> None:
    weight = random_blocks(name, 70, NUM_INPUTS, seed=3)
    ids = torch.tensor([69, 0, 31, 32, 33, 0])
    rows = kernels.rows(kernels.pack(weight), ids, torch.float32)
    expected = weight.rows(ids).dequantize(torch.float32)
    torch.testing.assert_close(rows, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_values_are_the_references_to_the_bit(
    kernels: NativeKernels, name: str, dtype: torch.dtype
) -> None:
    """The sign of zero, too."""
    weight = random_blocks(name, 37, NUM_INPUTS, seed=6)
    bits = torch.int16 if dtype is torch.bfloat16 else torch.int32
    values_OI = kernels.dequantize(weight, dtype)
    assert torch.equal(values_OI.view(bits), weight.dequantize(dtype).view(bits))


def test_parts_of_a_projection_are_of_any_format(kernels: NativeKernels) -> None:
    plain = activations(40, NUM_INPUTS, torch.bfloat16) * 0.1
    parts = [random_blocks("q4_k", 70, NUM_INPUTS, seed=4), plain]
    parts.append(random_blocks("q6_k", 33, NUM_INPUTS, seed=5))
    x_TI = activations(9, NUM_INPUTS, torch.bfloat16)
    bias_O, residual_TO = activations(1, 143, torch.bfloat16)[0], activations(9, 143, torch.float32)
    packed = kernels.pack(*parts)
    y_TO = kernels.linear(x_TI, packed, bias_O, residual_TO, torch.float32)
    alone = [kernels.linear(x_TI, kernels.pack(part), out_dtype=torch.float32) for part in parts]
    assert torch.equal(y_TO, torch.cat(alone, dim=1) + bias_O + residual_TO)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_number_of_threads_changes_nothing(kernels: NativeKernels, num_threads: int) -> None:
    packed = kernels.pack(random_blocks("q5_k", 200, 256, seed=6))
    x_TI = activations(50, 256, torch.bfloat16)
    expected = kernels.linear(x_TI, packed)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(kernels.linear(x_TI, packed), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(kernels: NativeKernels, value: float) -> None:
    x_TI = activations(20, 64, torch.bfloat16)
    x_TI[7, 40] = value
    x_TI[9] = 0
    y_TO = kernels.linear(x_TI, kernels.pack(random_blocks("q8_0", 40, 64, seed=7)))
    assert y_TO[7].isnan().all()
    assert y_TO.isnan().sum() == 40
    assert not y_TO[9].any()


def test_takes_no_more_memory_than_the_file(kernels: NativeKernels) -> None:
    """Scales of 6 bits take a byte."""
    for name, form in FORMATS.items():
        weight = random_blocks(name, 64, NUM_INPUTS, seed=8)
        grown = kernels.pack(weight).num_bytes / weight.blocks_OB.nbytes
        assert grown <= (1.03 if name in ("q4_k", "q5_k", "iq4_xs") else 1.0), form
