from __future__ import annotations

import pytest
import torch

from support.kernel_device import each_type, is_interpreted, on_device
from support.kernel_products import assert_near, random_rows, tolerance_of
from triptych.core.runtime.kernels.triton import fp8_linear
from triptych.core.runtime.kernels.triton.fp8_linear import BLOCK, reference, round_rows

pytestmark = pytest.mark.gpu
launch_fp8_linear = on_device(fp8_linear.launch_fp8_linear)
multiply_fp8 = on_device(fp8_linear.multiply_fp8)
launch_quantize_rows = on_device(fp8_linear.launch_quantize_rows)
NUM_OUTPUTS, NUM_INPUTS = 150, 300


def needs_units() -> None:
    if not is_interpreted() and not fp8_linear.has_float8_units(torch.device("cuda", 0)):
        pytest.skip("needs a device that multiplies float8")


def random_weight(num_outputs: int = NUM_OUTPUTS, num_inputs: int = NUM_INPUTS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(num_outputs, num_inputs, generator=generator) * 20).to(torch.float8_e4m3fn)


def random_scale(kind: str) -> torch.Tensor:
    shape = {"one": (1,), "outputs": (NUM_OUTPUTS,), "blocks": (2, 3)}[kind]
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) * 0.1


@pytest.mark.parametrize("num_rows", [1, 3, 17])
@pytest.mark.parametrize("kind", ["one", "outputs", "blocks"])
@pytest.mark.parametrize("has_units", [True, False])
@pytest.mark.parametrize("dtype", each_type())
def test_is_the_product_of_quantized_rows(
    kind: str, num_rows: int, has_units: bool, dtype: torch.dtype
) -> None:
    if has_units:
        needs_units()
    x_TI, weight = random_rows(num_rows, NUM_INPUTS, dtype), random_weight()
    scale = random_scale(kind)
    y_TO = multiply_fp8(x_TI, weight, scale, torch.float32, False, has_units=has_units)
    expected_TO = reference(x_TI, weight, scale, torch.float32, has_units=has_units)
    # Units for float8 sum with fewer bits than float32 has.
    tolerance = 2e-3 if has_units and not is_interpreted() else tolerance_of(dtype)
    assert_near(y_TO, expected_TO, tolerance)


def test_every_code_is_decoded_where_there_are_no_units() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite_I = codes[~codes.float().isnan()]
    y_IO = multiply_fp8(
        torch.eye(len(finite_I)),
        finite_I.unsqueeze(0),
        torch.ones(1),
        torch.float32,
        False,
        has_units=False,
    )
    assert torch.equal(y_IO[:, 0], finite_I.float())


@pytest.mark.parametrize("group_size", [NUM_INPUTS, BLOCK])
@pytest.mark.parametrize("row_multiple", [1, 4])
def test_rows_are_quantized_as_torch_does(group_size: int, row_multiple: int) -> None:
    x_TI = torch.randn(5, NUM_INPUTS, generator=torch.Generator().manual_seed(3))
    x_TI[2] = 0
    quantized_TI, scale_RT = launch_quantize_rows(x_TI, group_size, row_multiple)
    num_rows = 5 if row_multiple == 1 else 8
    assert quantized_TI.shape == (num_rows, NUM_INPUTS)
    assert scale_RT.shape == (-(-NUM_INPUTS // group_size), num_rows)
    scale_TR = scale_RT[:, :5].t()
    scale_TI = scale_TR.repeat_interleave(group_size, 1)[:, :NUM_INPUTS]
    found_TI, expected_TI = quantized_TI[:5].float() * scale_TI, round_rows(x_TI, group_size)
    is_equal_TI = torch.isclose(found_TI, expected_TI, rtol=0 if is_interpreted() else 1e-6, atol=0)
    # A GPU's quotients differ in the last bit, and so may what lies between two float8 numbers.
    assert is_equal_TI.float().mean() >= (1 if is_interpreted() else 0.995)
    torch.testing.assert_close(found_TI, expected_TI, rtol=2**-3, atol=1e-4)
    largest = torch.stack([part.abs().amax(1) for part in x_TI.split(group_size, 1)], 1)
    expected_scale = torch.where(largest == 0, 1, largest / 448)
    torch.testing.assert_close(scale_TR, expected_scale)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    x_TI, weight, scale = random_rows(3, NUM_INPUTS), random_weight(), random_scale("one")
    expected_TO = launch_fp8_linear(x_TI, weight, scale, torch.float32)
    x_TI[1, 7] = bad
    y_TO = launch_fp8_linear(x_TI, weight, scale, torch.float32)
    assert not y_TO[1].isfinite().any()
    assert torch.equal(y_TO[[0, 2]], expected_TO[[0, 2]])


def test_bfloat16_rows() -> None:
    x_TI, weight, scale = random_rows(3, NUM_INPUTS, torch.bfloat16), random_weight(), torch.ones(1)
    y_TO = launch_fp8_linear(x_TI, weight, scale, torch.bfloat16)
    expected_TO = reference(x_TI, weight, scale, torch.bfloat16)
    assert_near(y_TO, expected_TO, tolerance_of(torch.bfloat16))


@pytest.mark.usefixtures("rows_alike")
def test_in_deterministic_mode_a_row_does_not_depend_on_its_batch() -> None:
    x_TI, weight = random_rows(70, 1024), random_weight(20, 1024)
    scale = torch.full((20,), 0.01)
    together = launch_fp8_linear(x_TI, weight, scale, torch.float32, deterministic=True)
    for row in (0, 33, 69):
        alone = launch_fp8_linear(x_TI[row : row + 1], weight, scale, torch.float32, True)
        assert torch.equal(alone[0], together[row])
