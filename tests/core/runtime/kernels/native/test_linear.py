"""The native projection against float32 torch, on every instruction level."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.runtime.kernels.native.library import NativeKernels

SIZES = st.tuples(st.integers(1, 70), st.integers(1, 70), st.integers(1, 100))
# Deeper than what is widened at once, and more rows than a task takes.
LARGE = ((1, 40, 1100), (13, 33, 1025), (200, 32, 64), (389, 65, 31))
HALF_UNIT = {torch.bfloat16: 2.0**-8, torch.float32: 1e-5}
DTYPES = st.sampled_from([torch.bfloat16, torch.float32])


def random(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.bfloat16().to(dtype)


def check(
    kernels: NativeKernels,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    parts: tuple[bool, bool],
    seed: int = 0,
) -> None:
    """The result is torch's to one rounding, and each row's is bitwise that of the row alone."""
    (num_rows, num_outputs, num_inputs), (has_bias, has_residual) = sizes, parts
    x_TI = random(num_rows, num_inputs, seed=seed, dtype=dtype)
    weight_OI = random(num_outputs, num_inputs, seed=seed + 1, dtype=dtype)
    bias_O = random(num_outputs, seed=seed + 2, dtype=dtype) if has_bias else None
    residual_TO = (
        random(num_rows, num_outputs, seed=seed + 3, dtype=out_dtype) if has_residual else None
    )
    expected = x_TI.double() @ weight_OI.double().T
    for part in (bias_O, residual_TO):
        expected += 0 if part is None else part.double()

    assert kernels.can_pack(weight_OI)
    packed = kernels.pack(weight_OI)
    y_TO = kernels.linear(x_TI, packed, bias_O, residual_TO, out_dtype)
    assert y_TO.dtype == out_dtype
    torch.testing.assert_close(y_TO.double(), expected, atol=1e-3, rtol=HALF_UNIT[out_dtype])
    for row in {*range(min(num_rows, 40)), num_rows - 1}:
        residual = None if residual_TO is None else residual_TO[row : row + 1]
        alone = kernels.linear(x_TI[row : row + 1], packed, bias_O, residual, out_dtype)
        assert torch.equal(alone[0], y_TO[row])


@settings(max_examples=60, deadline=None)
@given(
    sizes=SIZES,
    dtype=DTYPES,
    out_dtype=DTYPES,
    parts=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_agrees_with_torch_row_by_row(
    kernels: NativeKernels,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    parts: tuple[bool, bool],
    seed: int,
) -> None:
    check(kernels, sizes, dtype, out_dtype, parts, seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", LARGE)
def test_many_rows_and_inputs(
    kernels: NativeKernels, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    check(kernels, sizes, dtype, torch.float32, (True, True))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_number_of_threads_changes_nothing(kernels: NativeKernels, num_threads: int) -> None:
    x_TI = random(50, 70, seed=1, dtype=torch.bfloat16)
    packed = kernels.pack(random(200, 70, seed=2, dtype=torch.bfloat16))
    expected = kernels.linear(x_TI, packed)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(kernels.linear(x_TI, packed), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_inputs", [31, 32, 64])
def test_nan_stays_in_its_row(kernels: NativeKernels, num_inputs: int, dtype: torch.dtype) -> None:
    x_TI = random(20, num_inputs, seed=1, dtype=dtype)
    x_TI[7] = float("nan")
    packed = kernels.pack(random(40, num_inputs, seed=2, dtype=dtype))
    is_nan = kernels.linear(x_TI, packed).isnan()
    assert is_nan[7].all()
    assert is_nan.sum() == 40


def test_what_it_does_not_pack(kernels: NativeKernels) -> None:
    assert not kernels.can_pack(torch.zeros(4, 4, dtype=torch.float16))
    assert not kernels.can_pack(torch.zeros(4, 4, dtype=torch.bfloat16, device="meta"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(1, 3, 7, 5), (45, 2, 33, 40)])
def test_each_head_has_a_matrix_of_its_own(
    kernels: NativeKernels, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Of inputs and outputs that are not adjacent; as each head's projection, bit by bit."""
    num_rows, num_heads, num_outputs, num_inputs = sizes
    wide = random(num_rows, num_heads, num_inputs + 3, seed=1, dtype=dtype)
    x_THI = wide[:, :, 1 : num_inputs + 1]
    weight_HOI = random(num_heads, num_outputs, num_inputs, seed=2, dtype=dtype)
    y_THO = kernels.head_linear(x_THI, kernels.pack(*weight_HOI))
    for head in range(num_heads):
        x_TI, weight_OI = x_THI[:, head].contiguous(), weight_HOI[head]
        assert torch.equal(y_THO[:, head], kernels.linear(x_TI, kernels.pack(weight_OI)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_read_back(kernels: NativeKernels, dtype: torch.dtype) -> None:
    weight_OI, ids = random(70, 33, seed=1, dtype=dtype), torch.tensor([69, 0, 31, 32, 32])
    assert torch.equal(kernels.rows(kernels.pack(weight_OI), ids, dtype), weight_OI[ids])
