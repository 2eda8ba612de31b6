"""Bits of float8 against torch's conversion."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from support.kernel_device import on_device
from triptych.core.runtime.kernels.triton.float8 import as_stored, to_stored

pytestmark = pytest.mark.gpu


@triton.jit
def _convert(values_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, to_stored(tl.load(values_ptr + at), out_ptr.dtype.element_ty))


@on_device
def converted(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    _convert[(1,)](values, as_stored(out), SIZE=len(values))
    return out


def test_rounds_as_torch_does() -> None:
    generator = torch.Generator().manual_seed(1)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    between = (every.sort().values[1:] + every.sort().values[:-1]) / 2  # ties
    size = torch.exp2(torch.randint(-14, 8, (1024,), generator=generator).float())
    values = torch.randn(1024, generator=generator) * size
    values = torch.cat((every, between, values, torch.zeros(4096)))[:2048].clamp(-448, 448)
    expected = values.to(torch.float8_e4m3fn)
    assert torch.equal(
        converted(values, torch.float8_e4m3fn).view(torch.uint8), expected.view(torch.uint8)
    )


def test_saturates_and_keeps_nan() -> None:
    values = torch.tensor([449.0, -1e9, torch.inf, torch.nan])
    found = converted(values, torch.float8_e4m3fn).float()
    assert found[:3].tolist() == [448.0, -448.0, 448.0]
    assert found[3].isnan()


def test_other_types_are_cast() -> None:
    values = torch.tensor([1.001, -2.0, 3e-9, 0.0])
    assert torch.equal(converted(values, torch.bfloat16), values.to(torch.bfloat16))
