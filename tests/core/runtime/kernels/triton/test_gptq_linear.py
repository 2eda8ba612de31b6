from __future__ import annotations

import pytest
import torch

from support.kernel_device import each_type, on_device
from support.kernel_products import assert_near, random_rows, tolerance_of
from triptych.core.runtime.kernels.triton import gptq_linear
from triptych.core.runtime.kernels.triton.gptq_linear import reference

pytestmark = pytest.mark.gpu
launch_gptq_linear = on_device(gptq_linear.launch_gptq_linear)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs lies in each half byte of a word, the lowest first."""


def pack(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Words of eight values of four bits of the last axis."""
    eights = values.unflatten(-1, (-1, 8))[..., list(order)].to(torch.int64)
    words = (eights << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


class Weights:
    """Random weights of four bits, and what they are packed."""

    def __init__(self, num_inputs: int, num_outputs: int, num_groups: int) -> None:
        generator = torch.Generator().manual_seed(num_inputs + num_outputs)
        self.packed_IO = torch.randint(0, 16, (num_inputs, num_outputs), generator=generator)
        self.zero_RO = torch.randint(1, 16, (num_groups, num_outputs), generator=generator)
        self.scale_RO = torch.rand(num_groups, num_outputs, generator=generator) * 0.1
        self.groups_I = torch.arange(num_inputs) * num_groups // num_inputs

    def values(self) -> torch.Tensor:
        offsets = self.packed_IO - self.zero_RO[self.groups_I]
        return offsets * self.scale_RO[self.groups_I]

    def arguments(self, layout: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if layout == "awq":
            zeros = pack(self.zero_RO, AWQ_ORDER)
            return pack(self.packed_IO, AWQ_ORDER), self.scale_RO, zeros
        stored = self.zero_RO - int(layout == "gptq")
        return pack(self.packed_IO.t()).t().contiguous(), self.scale_RO, pack(stored)


@pytest.mark.parametrize("num_rows", [1, 3, 17])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq"])
@pytest.mark.parametrize("dtype", each_type())
def test_is_the_product_with_the_weights_that_were_packed(
    layout: str, num_rows: int, dtype: torch.dtype
) -> None:
    weights = Weights(num_inputs=288, num_outputs=72, num_groups=3)
    x_TI = random_rows(num_rows, 288, dtype)
    y_TO = launch_gptq_linear(x_TI, *weights.arguments(layout), None, layout, torch.float32)
    assert_near(y_TO, x_TI.float() @ weights.values(), tolerance_of(dtype))


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq"])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_the_reference_is_that_product(layout: str, num_groups: int) -> None:
    weights = Weights(num_inputs=96, num_outputs=40, num_groups=num_groups)
    x_TI = random_rows(3, 96)
    y_TO = reference(x_TI, *weights.arguments(layout), None, layout, torch.float32)
    assert_near(y_TO, x_TI @ weights.values())


def test_groups_of_inputs_in_any_order() -> None:
    weights = Weights(num_inputs=192, num_outputs=24, num_groups=3)
    weights.groups_I = weights.groups_I[torch.randperm(192, generator=torch.Generator())]
    x_TI, groups_I = random_rows(3, 192), weights.groups_I.to(torch.int32)
    for run in (launch_gptq_linear, reference):
        y_TO = run(x_TI, *weights.arguments("gptq"), groups_I, "gptq", torch.float32)
        assert_near(y_TO, x_TI @ weights.values())


def test_one_group_of_inputs_that_fill_no_step() -> None:
    weights = Weights(num_inputs=72, num_outputs=24, num_groups=1)
    x_TI = random_rows(3, 72)
    y_TO = launch_gptq_linear(x_TI, *weights.arguments("gptq_v2"), None, "gptq_v2", torch.float32)
    assert_near(y_TO, x_TI @ weights.values())


def test_words_of_compressed_tensors_are_taken_transposed() -> None:
    weights = Weights(num_inputs=128, num_outputs=21, num_groups=2)
    weights.zero_RO.fill_(8)
    words_OI = pack(weights.packed_IO.t())
    scale_OR = weights.scale_RO.t().contiguous()
    x_TI = random_rows(3, 128)
    for run in (launch_gptq_linear, reference):
        y_TO = run(x_TI, words_OI.t(), scale_OR.t(), None, None, "gptq", torch.float32)
        assert_near(y_TO, x_TI @ weights.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types_of_rows(dtype: torch.dtype) -> None:
    weights = Weights(num_inputs=128, num_outputs=24, num_groups=1)
    weights.scale_RO = weights.scale_RO.to(torch.float16)
    x_TI = random_rows(3, 128, dtype)
    arguments = *weights.arguments("gptq"), None, "gptq"
    y_TO = launch_gptq_linear(x_TI, *arguments, dtype)
    assert y_TO.dtype is dtype
    expected_TO = reference(x_TI, *arguments, dtype)
    assert_near(y_TO, expected_TO, tolerance_of(dtype))


@pytest.mark.usefixtures("rows_alike")
def test_in_deterministic_mode_a_row_does_not_depend_on_its_batch() -> None:
    weights = Weights(num_inputs=1024, num_outputs=24, num_groups=8)
    x_TI, arguments = random_rows(70, 1024), (*weights.arguments("gptq"), None, "gptq")
    together = launch_gptq_linear(x_TI, *arguments, torch.float32, deterministic=True)
    for row in (0, 33, 69):
        alone = launch_gptq_linear(x_TI[row : row + 1], *arguments, torch.float32, True)
        assert torch.equal(alone[0], together[row])
