"""The library's products against ours. Here its operator is a stand-in with the same conditions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from support.kernel_products import assert_near, random_rows, tolerance_of
from triptych.core.runtime.kernels import library_products
from triptych.core.runtime.kernels.library_products import (
    MIN_ROWS,
    prefers_library,
    scaled_linear,
    takes_scaled,
)
from triptych.core.runtime.kernels.packed_linear import Float8Weight, packed_linear
from triptych.core.runtime.kernels.triton import fp8_linear

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
NUM_OUTPUTS, NUM_INPUTS = 272, 1024
SCALES = {"one": (1,), "outputs": (NUM_OUTPUTS,), "blocks": (3, 8)}


def random_weight(
    kind: str, device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(kind))
    weight_OI = torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=generator).to(E4M3)
    scale = torch.rand(SCALES[kind], generator=generator) + 0.1
    return weight_OI.to(device), scale.to(device)


def stand_in(
    a_TI: torch.Tensor,
    b_IO: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """`torch._scaled_mm` with scales of rows, or of 128 inputs and squares of 128, on an H100."""
    (num_rows, num_inputs), num_outputs = a_TI.shape, b_IO.shape[1]
    assert a_TI.dtype == b_IO.dtype == E4M3
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert a_TI.is_contiguous()
    assert b_IO.t().is_contiguous()
    assert num_inputs % 16 == num_outputs % 16 == 0
    assert not use_fast_accum
    if scale_a.shape == (num_rows, 1):
        assert scale_b.shape == (1, num_outputs)
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        y_TO = a_TI.float() * scale_a @ (b_IO.float() * scale_b)
        return (y_TO if bias is None else y_TO + bias).to(out_dtype)
    assert bias is None
    num_blocks = num_inputs // 128
    assert num_blocks % 4 == num_rows % 4 == 0
    assert (scale_a.shape, scale_a.stride()) == ((num_rows, num_blocks), (1, num_rows))
    squares = num_blocks, -(-num_outputs // 128)
    assert (scale_b.shape, scale_b.stride()) == (squares, (1, num_blocks))
    a = a_TI.float() * scale_a.repeat_interleave(128, 1)
    factors_IO = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :num_outputs]
    return (a @ (b_IO.float() * factors_IO)).to(out_dtype)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", stand_in)
    monkeypatch.setattr(fp8_linear, "quantize_rows", fp8_linear.launch_quantize_rows)
    monkeypatch.setattr(library_products, "cuda_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_is_the_product_of_our_kernel(kind: str, num_rows: int) -> None:
    x_TI, (weight_OI, scale) = random_rows(num_rows, NUM_INPUTS), random_weight(kind)
    assert takes_scaled(weight_OI, scale, BF16)
    y_TO = scaled_linear(x_TI, weight_OI, scale, torch.float32)
    expected_TO = fp8_linear.reference(x_TI, weight_OI, scale, torch.float32)
    assert y_TO.is_contiguous()
    assert_near(y_TO, expected_TO)
    bias_O = torch.arange(NUM_OUTPUTS).float()
    y_TO = scaled_linear(x_TI, weight_OI, scale, torch.float32, bias_O)
    assert_near(y_TO, expected_TO + bias_O)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("num_rows", [1, 3, 17, 70, 1000])
def test_is_the_product_of_our_kernel_on_the_device(
    kind: str, num_rows: int, cuda: torch.device
) -> None:
    x_TI = random_rows(num_rows, NUM_INPUTS, BF16).to(cuda)
    weight_OI, scale = random_weight(kind, cuda)
    if not takes_scaled(weight_OI, scale, BF16):
        pytest.skip("the library has no such product on this device")
    y_TO = scaled_linear(x_TI, weight_OI, scale, BF16)
    assert_near(y_TO, fp8_linear.reference(x_TI, weight_OI, scale, BF16), tolerance_of(BF16))
    ours_TO = fp8_linear.fp8_linear(x_TI, weight_OI, scale, BF16)
    assert_near(y_TO, ours_TO, tolerance_of(BF16))


@pytest.mark.parametrize("kind", SCALES)
def test_torch_accepts_what_it_is_given(kind: str) -> None:
    """By its own conditions for tensors of a GPU, which need no GPU."""
    with FakeTensorMode():
        x_TI = torch.empty(70, NUM_INPUTS, dtype=BF16, device="cuda")
        weight_OI = torch.empty(NUM_OUTPUTS, NUM_INPUTS, dtype=E4M3, device="cuda")
        scale = torch.empty(SCALES[kind], device="cuda")
        y_TO = scaled_linear(
            x_TI, weight_OI, scale, BF16, torch.empty(NUM_OUTPUTS, dtype=BF16, device="cuda")
        )
    assert (y_TO.shape, y_TO.dtype, y_TO.device.type) == ((70, NUM_OUTPUTS), BF16, "cuda")


@pytest.mark.parametrize(
    ("capability", "kind", "shape", "dtype", "is_taken"),
    [
        ((9, 0), "outputs", (272, 1024), BF16, True),
        ((9, 0), "blocks", (272, 1024), BF16, True),
        ((8, 9), "outputs", (272, 1024), BF16, True),
        ((8, 9), "blocks", (272, 1024), BF16, False),
        ((10, 0), "blocks", (272, 1024), BF16, False),
        ((8, 0), "one", (272, 1024), BF16, False),
        (None, "one", (272, 1024), BF16, False),
        ((9, 0), "one", (272, 1024), torch.float16, False),
        ((9, 0), "one", (272, 1032), BF16, False),
        ((9, 0), "one", (264, 1024), BF16, False),
        ((9, 0), "blocks", (272, 1280), BF16, False),
    ],
)
def test_what_the_library_takes(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] | None,
    kind: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    is_taken: bool,
) -> None:
    monkeypatch.setattr(library_products, "cuda_capability", lambda device: capability)
    monkeypatch.setattr(library_products, "_cuda_version", lambda: (13, 0))
    assert takes_scaled(torch.empty(shape), torch.empty(SCALES[kind]), dtype) is is_taken


def test_blocks_need_a_recent_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_products, "cuda_capability", lambda device: (9, 0))
    monkeypatch.setattr(library_products, "_cuda_version", lambda: (12, 8))
    weight_OI = torch.empty(NUM_OUTPUTS, NUM_INPUTS)
    assert not takes_scaled(weight_OI, torch.empty(SCALES["blocks"]), BF16)
    assert takes_scaled(weight_OI, torch.empty(SCALES["outputs"]), BF16)


@pytest.mark.usefixtures("library")
def test_only_large_batches_prefer_it() -> None:
    weight_OI, scale = random_weight("one")
    for num_rows in (1, MIN_ROWS - 1, MIN_ROWS):
        x_TI = torch.empty(num_rows, NUM_INPUTS)
        assert prefers_library(x_TI, weight_OI, scale, BF16) is (num_rows == MIN_ROWS)


@pytest.mark.usefixtures("library")
def test_deterministic_products_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def note(name: str) -> Any:
        return lambda x_TI, *rest: called.append(name) or x_TI

    monkeypatch.setattr(fp8_linear, "fp8_linear", note("ours"))
    monkeypatch.setattr(
        "triptych.core.runtime.kernels.packed_linear.scaled_linear", note("library")
    )
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    weight, x_TI = Float8Weight(*random_weight("one")), torch.empty(MIN_ROWS, NUM_INPUTS)
    packed_linear(x_TI, weight, BF16, is_deterministic=True)
    packed_linear(x_TI, weight, BF16)
    packed_linear(x_TI[1:], weight, BF16)
    assert called == ["ours", "library", "ours"]
