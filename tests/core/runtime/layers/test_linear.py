"""A projection whose weight is partly in blocks of integers, with and without native kernels."""

import weakref

import pytest
import torch

from support.block_weights import random_blocks
from triptych.core.block_formats import FORMATS
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.linear import Linear

CPU = torch.device("cpu")
NUM_INPUTS = 256


def mixed(native: NativeKernels | None) -> tuple[Linear, torch.Tensor]:
    """A plain part between two in blocks, and the values of all."""
    linear = Linear(NUM_INPUTS, 80, has_bias=True, dtype=torch.float32, device=CPU)
    first, last = (
        random_blocks("q5_k", 30, NUM_INPUTS, seed=1),
        random_blocks("q8_0", 35, NUM_INPUTS, seed=2),
    )
    plain = torch.randn(15, NUM_INPUTS) * 0.1
    assert linear.bias_O is not None
    linear.bias_O.copy_(torch.randn(80))
    linear.hold(45, last)
    linear.weight_OI[30:45] = plain
    linear.hold(0, first)
    values = [first.dequantize(torch.float32), plain, last.dequantize(torch.float32)]
    linear.prepare(native)
    return linear, torch.cat(values)


@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("is_native", [True, False])
def test_parts_follow_each_other(
    native: NativeKernels, *, is_native: bool, has_residual: bool
) -> None:
    linear, values_OI = mixed(native if is_native else None)
    assert linear.has_blocks
    x_TI = torch.randn(5, NUM_INPUTS)
    residual_TO = torch.randn(5, 80) if has_residual else None
    expected = x_TI @ values_OI.T + linear.bias_O
    expected += 0 if residual_TO is None else residual_TO
    error = linear(x_TI, residual_TO, torch.float32) - expected
    assert error.norm() < (0.01 if is_native else 1e-6) * expected.norm()


def test_plain_rows_with_blocks_are_all_that_is_plain() -> None:
    linear, values_OI = mixed(None)
    first, last = FORMATS["q5_k"], FORMATS["q8_0"]
    in_blocks = 30 * first.row_bytes(NUM_INPUTS) + 35 * last.row_bytes(NUM_INPUTS)
    assert linear.num_bytes == in_blocks + 15 * NUM_INPUTS * 4
    linear.prepare()
    x_TI = torch.randn(2, NUM_INPUTS)
    expected = x_TI @ values_OI.T + linear.bias_O
    assert (linear(x_TI) - expected).norm() < 1e-6 * expected.norm()


def test_what_neighbours_are_joined_of_is_let_go() -> None:
    kinds = ("q8_0", "q8_0", "q5_k")
    linear = Linear(NUM_INPUTS, 60, has_bias=False, dtype=torch.float32, device=CPU)
    num_bytes, joined = 0, []
    for place, kind in enumerate(kinds):
        part = random_blocks(kind, 20, NUM_INPUTS, seed=place)
        linear.hold(20 * place, part)
        num_bytes += part.num_bytes
        joined += [weakref.ref(part.blocks_OB)] if kind == "q8_0" else []
        del part
    assert all(part() is not None for part in joined)
    linear.prepare()
    assert linear.num_bytes == num_bytes
    assert all(part() is None for part in joined)


@pytest.mark.parametrize("is_native", [True, False])
def test_rows_of_a_table_in_blocks(native: NativeKernels, *, is_native: bool) -> None:
    table = random_blocks("q6_k", 50, NUM_INPUTS, seed=3)
    linear = Linear(NUM_INPUTS, 50, has_bias=False, dtype=torch.bfloat16, device=CPU)
    linear.hold(0, table)
    linear.prepare(native if is_native else None)
    ids = torch.tensor([49, 0, 49])
    expected = table.rows(ids).dequantize(torch.bfloat16)
    torch.testing.assert_close(linear.rows(ids), expected, atol=0, rtol=2**-7)


def test_rows_of_a_plain_table_are_kept_on_demand(native: NativeKernels) -> None:
    weight = torch.randn(50, 32).bfloat16()
    linear, kept = Linear.of(weight.clone()), Linear.of(weight.clone())
    linear.prepare(native)
    kept.prepare(native, keeps_rows=True)
    assert torch.equal(kept.rows(torch.tensor([3])), weight[3:4])
    assert not linear.weight_OI.numel()


def test_types_that_the_kernels_do_not_know_run_in_torch(native: NativeKernels) -> None:
    weight = random_blocks("q8_0", 20, NUM_INPUTS, seed=4)
    linear = Linear(NUM_INPUTS, 20, has_bias=False, dtype=torch.float16, device=CPU)
    linear.hold(0, weight)
    linear.prepare(native)
    x_TI = torch.randn(3, NUM_INPUTS).half()
    expected = x_TI.float() @ weight.dequantize(torch.float32).T
    torch.testing.assert_close(linear(x_TI).float(), expected, atol=0.02, rtol=0.01)
