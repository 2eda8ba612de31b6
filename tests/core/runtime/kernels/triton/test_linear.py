from __future__ import annotations

import pytest
import torch

from support.kernel_device import each_type, on_device
from support.kernel_products import assert_near, random_rows, tolerance_of
from triptych.core.runtime.kernels.triton import head_linear, linear
from triptych.core.runtime.kernels.triton.linear import reference

pytestmark = pytest.mark.gpu
launch_linear = on_device(linear.launch_linear)
launch_heads = on_device(head_linear.launch)


def random_operands(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    return random_rows(num_rows, num_inputs, dtype), random_rows(num_outputs, num_inputs, dtype)


@pytest.mark.parametrize("num_rows", [1, 3, 17, 130])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", each_type())
def test_is_the_product(num_rows: int, deterministic: bool, dtype: torch.dtype) -> None:
    x_TI, weight_OI = random_operands(num_rows, 500, 77, dtype)
    y_TO = launch_linear(x_TI, weight_OI, torch.float32, deterministic)
    assert_near(y_TO, reference(x_TI, weight_OI, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types(dtype: torch.dtype) -> None:
    x_TI, weight_OI = random_operands(3, 96, 40, dtype)
    y_TO = launch_linear(x_TI, weight_OI, dtype)
    assert y_TO.dtype is dtype
    expected_TO = reference(x_TI, weight_OI, dtype)
    assert_near(y_TO, expected_TO, tolerance_of(dtype))


def test_operands_may_be_slices() -> None:
    x_TI, weight_OI = random_operands(5, 200, 90)
    y_TO = launch_linear(x_TI[:, 100:], weight_OI[10:, :100], torch.float32)
    expected_TO = x_TI[:, 100:] @ weight_OI[10:, :100].t()
    assert_near(y_TO, expected_TO)


def test_a_row_that_is_not_finite_fails_alone() -> None:
    x_TI, weight_OI = random_operands(3, 96, 40)
    x_TI[1, 5] = float("nan")
    y_TO = launch_linear(x_TI, weight_OI, torch.float32)
    assert y_TO[1].isnan().all()
    assert y_TO[[0, 2]].isfinite().all()


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("num_outputs", [16, 130])
def test_in_deterministic_mode_a_row_does_not_depend_on_its_batch(num_outputs: int) -> None:
    x_TI, weight_OI = random_operands(70, 512, num_outputs)
    together = launch_linear(x_TI, weight_OI, torch.float32, deterministic=True)
    for rows in (slice(0, 1), slice(33, 36), slice(69, 70)):
        some = launch_linear(x_TI[rows], weight_OI, torch.float32, deterministic=True)
        assert torch.equal(some, together[rows])


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("dtype", each_type())
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(50, 7), (32, 66)])
def test_heads_have_products_of_their_own(
    num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> None:
    x_THI = random_rows(67 * 3, num_inputs + 8, dtype).unflatten(0, (67, 3))[..., 8:]
    weight_HOI = random_rows(3 * num_outputs, num_inputs, dtype).unflatten(0, (3, -1))
    found_THO = launch_heads(x_THI, weight_HOI)
    expected_THO = torch.einsum("thi,hoi->tho", x_THI.float(), weight_HOI.float())
    assert_near(found_THO.float(), expected_THO, tolerance_of(dtype))
    assert torch.equal(launch_heads(x_THI[40:41], weight_HOI), found_THO[40:41])
