"""The products as operators of a GPU: on tensors that only say so, and as they are compiled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from support.triton_products import missing_variants
from triptych.core.runtime.kernels.triton.compile import TARGETS, _prepare_process
from triptych.core.runtime.kernels.triton.fp8_linear import fp8_linear
from triptych.core.runtime.kernels.triton.gguf_linear import gguf_linear
from triptych.core.runtime.kernels.triton.gptq_linear import gptq_linear
from triptych.core.runtime.kernels.triton.linear import linear
from triptych.core.runtime.kernels.triton.lora import lora_add
from triptych.core.runtime.kernels.triton.moe import moe_mlp
from triptych.core.runtime.kernels.triton.routing import route

BF16 = torch.bfloat16
T, E, C, F = 3, 4, 2, 24
NUM_INPUTS, NUM_OUTPUTS = 256, 40


def _empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _words(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.int32)


def _float32(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.float32)


def _linear(x_TI: torch.Tensor) -> Any:
    return linear(x_TI, _empty(NUM_OUTPUTS, NUM_INPUTS), BF16)


def _gguf(x_TI: torch.Tensor) -> Any:
    return gguf_linear(x_TI, _empty(NUM_OUTPUTS, 144, dtype=torch.uint8), "q4_k", BF16)


def _gptq(x_TI: torch.Tensor) -> Any:
    words, zeros = _words(NUM_INPUTS // 8, NUM_OUTPUTS), _words(2, NUM_OUTPUTS // 8)
    return gptq_linear(x_TI, words, _empty(2, NUM_OUTPUTS), zeros, None, "gptq", BF16)


def _fp8(x_TI: torch.Tensor) -> Any:
    weight = _empty(NUM_OUTPUTS, NUM_INPUTS, dtype=torch.float8_e4m3fn)
    return fp8_linear(x_TI, weight, _float32(1), BF16)


PRODUCTS = [_linear, _gguf, _gptq, _fp8]


@pytest.mark.parametrize("product", PRODUCTS)
def test_linear_products(product: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with FakeTensorMode():
        y_TO = product(_empty(T, NUM_INPUTS))
    assert (y_TO.shape, y_TO.dtype, y_TO.device.type) == ((T, NUM_OUTPUTS), BF16, "cuda")


@pytest.mark.parametrize("product", PRODUCTS)
def test_operands_on_two_devices_are_refused(product: Callable[[torch.Tensor], object]) -> None:
    with FakeTensorMode(), pytest.raises(AssertionError):
        product(torch.empty(T, NUM_INPUTS, dtype=BF16))


def test_experts() -> None:
    with FakeTensorMode():
        weights_TC, experts_TC = route(_empty(T, E), _float32(E), C, "sigmoid", True, 1.0, [])
        x_TI, down_EIF = _empty(T, NUM_INPUTS), _empty(E, NUM_INPUTS, F)
        gate_up_EFI = _empty(E, 2 * F, NUM_INPUTS)
        y_TI = moe_mlp(x_TI, gate_up_EFI, down_EIF, weights_TC, experts_TC, "silu")
    assert (weights_TC.shape, weights_TC.dtype) == ((T, C), torch.float32)
    assert (experts_TC.shape, experts_TC.dtype) == ((T, C), torch.int32)
    assert (y_TI.shape, y_TI.dtype, y_TI.device.type) == ((T, NUM_INPUTS), BF16, "cuda")


def test_adapters_are_added_in_place() -> None:
    with FakeTensorMode():
        y_TO, x_TI = _empty(T, NUM_OUTPUTS), _empty(T, NUM_INPUTS)
        a_LRI, b_LOR = _empty(E, 8, NUM_INPUTS), _empty(E, NUM_OUTPUTS, 8)
        lora_add(y_TO, x_TI, a_LRI, b_LOR, _float32(T), _words(T))
    assert [each.name for each in lora_add._schema.arguments if each.is_write] == ["y_TO"]


def test_what_is_compiled_ahead_is_what_launches_ask_for() -> None:
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=_prepare_process, initargs=(None,)
    ) as pool:
        assert pool.submit(missing_variants, *TARGETS[1::2]).result() == []
