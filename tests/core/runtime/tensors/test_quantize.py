"""Blocks made of plain weights: sizes, errors, and weights that are easy to hold."""

import pytest
import torch

from triptych.core.block_formats import FORMATS
from triptych.core.runtime.tensors.quantize import quantize_blocks, quantize_float8

# Of normally distributed weights; llama.cpp's own are within a few per cent of these.
ERRORS = {"q8_0": 0.006, "q6_k": 0.02, "q5_1": 0.04, "q5_0": 0.045, "q4_k": 0.08}
ERRORS |= {"q4_1": 0.08, "q4_0": 0.09}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ERRORS)
def test_errs_no_more_than_the_format_must(name: str, dtype: torch.dtype) -> None:
    weight = torch.randn(40, 512, generator=torch.Generator().manual_seed(1)).to(dtype) * 0.02
    packed = quantize_blocks(weight, FORMATS[name])
    assert packed.shape == (40, 512)
    error = packed.dequantize(torch.float32) - weight.float()
    assert error.norm() < ERRORS[name] * weight.float().norm()


@pytest.mark.parametrize("name", ERRORS)
def test_zeros_stay_zeros(name: str) -> None:
    assert not quantize_blocks(torch.zeros(2, 256), FORMATS[name]).dequantize(torch.float32).any()


@pytest.mark.parametrize("name", ["q4_k", "q6_k"])
def test_weights_of_one_sign(name: str) -> None:
    for weight in (torch.linspace(0.1, 0.2, 256)[None], torch.linspace(-0.2, -0.1, 256)[None]):
        error = quantize_blocks(weight, FORMATS[name]).dequantize(torch.float32) - weight
        assert error.abs().max() < 0.01


def test_what_was_float8_is_kept_exactly_as_float8() -> None:
    weight_OI = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 0.02
    weight_OI[0], weight_OI[1, 0] = 0.0, 448.0
    stored_OI = weight_OI.to(torch.float8_e4m3fn).float()
    held = quantize_float8(stored_OI)
    assert torch.equal(held.weight_OI.float() * held.scale[:, None], stored_OI)


def test_float8_errs_by_half_of_its_last_bit() -> None:
    weight_OI = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    held = quantize_float8(weight_OI)
    found_OI = held.weight_OI.float() * held.scale[:, None]
    smallest_O1 = weight_OI.abs().amax(dim=1, keepdim=True) * 2.0**-13
    bound_OI = torch.maximum(weight_OI.abs(), smallest_O1) * 2.0**-4
    assert (found_OI - weight_OI).abs().le(bound_OI).all()
