from __future__ import annotations

import pytest
import torch

from support.kernel_device import each_type, on_device
from support.kernel_products import assert_near, tolerance_of
from triptych.core.runtime.kernels.triton import lora
from triptych.core.runtime.kernels.triton.lora import reference

pytestmark = pytest.mark.gpu
launch_lora_add = on_device(lora.launch_lora_add)

NUM_INPUTS, NUM_OUTPUTS, NUM_ADAPTERS = 300, 70, 3


def random_batch(
    num_rows: int, rank: int, dtype: torch.dtype = torch.float32, num_inputs: int = NUM_INPUTS
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_rows + rank)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return (
        normal(num_rows, NUM_OUTPUTS).to(dtype),
        normal(num_rows, num_inputs).to(dtype),
        (normal(NUM_ADAPTERS, rank, num_inputs) * 0.1).to(dtype),
        (normal(NUM_ADAPTERS, NUM_OUTPUTS, rank) * 0.1).to(dtype),
        torch.rand(num_rows, generator=generator),
        torch.randint(-1, NUM_ADAPTERS, (num_rows,), generator=generator, dtype=torch.int32),
    )


@pytest.mark.parametrize("num_rows", [1, 3, 17])
@pytest.mark.parametrize("rank", [1, 8, 24, 128])
@pytest.mark.parametrize("dtype", each_type())
def test_adds_each_rows_adapter(num_rows: int, rank: int, dtype: torch.dtype) -> None:
    batch = random_batch(num_rows, rank, dtype)
    expected_TO = reference(*batch)
    launch_lora_add(*batch)
    assert_near(batch[0], expected_TO, tolerance_of(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types(dtype: torch.dtype) -> None:
    batch = random_batch(5, 16, dtype)
    expected_TO = reference(*batch)
    launch_lora_add(*batch)
    assert_near(batch[0], expected_TO, tolerance_of(dtype))


def test_rows_without_an_adapter_are_left_as_they_are() -> None:
    y_TO, x_TI, *rest, adapters_T = random_batch(6, 8)
    adapters_T[:] = torch.tensor([-1, 0, -1, 2, -1, -1])
    y_TO[0] = float("nan")
    before_TO = y_TO.clone()
    launch_lora_add(y_TO, x_TI, *rest, adapters_T)
    untouched = adapters_T < 0
    assert torch.equal(y_TO[untouched].view(torch.int32), before_TO[untouched].view(torch.int32))
    assert (y_TO[~untouched] != before_TO[~untouched]).all()


def test_the_result_may_be_columns_of_a_wider_one() -> None:
    y_TO, *rest = random_batch(5, 8)
    wide = torch.zeros(5, NUM_OUTPUTS + 20)
    wide[:, 10:-10] = y_TO
    launch_lora_add(wide[:, 10:-10], *rest)
    assert_near(wide[:, 10:-10], reference(y_TO, *rest))
    assert not wide[:, :10].any()
    assert not wide[:, -10:].any()


@pytest.mark.usefixtures("rows_alike")
def test_in_deterministic_mode_a_row_does_not_depend_on_its_batch() -> None:
    y_TO, x_TI, a_LRI, b_LOR, scales_T, adapters_T = random_batch(70, 16, num_inputs=512)
    together_TO = y_TO.clone()
    launch_lora_add(together_TO, x_TI, a_LRI, b_LOR, scales_T, adapters_T, deterministic=True)
    for row in (0, 33, 69):
        own = slice(row, row + 1)
        alone_TO = y_TO[own].clone()
        of_row = scales_T[own], adapters_T[own]
        launch_lora_add(alone_TO, x_TI[own], a_LRI, b_LOR, *of_row, deterministic=True)
        assert torch.equal(alone_TO[0], together_TO[row])
