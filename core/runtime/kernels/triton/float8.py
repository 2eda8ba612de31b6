"""Converts numbers to storage cells and back: float8 (e4m3) as its bits, int8, or a plain type.

Owns the conversions, which every GPU can do, whatever its instructions. Writing rounds to nearest
even; values beyond the range saturate. Float8 is stored as uint8, and its NaN stays NaN. Cells of
int8 hold multiples of a scale, which the caller loads and stores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def as_stored(pages: torch.Tensor) -> torch.Tensor:
    """View the tensor as a kernel takes it: float8 as its bits, other types unchanged."""
    return pages.view(torch.uint8) if pages.dtype is torch.float8_e4m3fn else pages


@triton.jit
def to_stored(values, dtype: tl.constexpr):
    """Convert float32 to storage: cast to `dtype`, or to the bits of float8 where that is uint8."""
    if dtype == tl.uint8:
        return _e4m3_bits(values)
    elif dtype == tl.int8:
        nearest = (values + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: no fraction is left
        return tl.minimum(tl.maximum(nearest, -127.0), 127.0).to(tl.int8)
    else:
        return values.to(dtype)


@triton.jit
def dequantized(x, DTYPE: tl.constexpr):
    """Convert stored values to `DTYPE`. `uint8` holds bits of float8, of which NaN reads as 480."""
    if x.dtype == tl.uint8:
        # Shifted to sign, exponent and fraction of float32, the bits are the number divided by
        # 2^120.
        bits = x.to(tl.uint32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        x = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif x.dtype == tl.int8:
        x = x.to(tl.float32)
    return x.to(DTYPE)


@triton.jit
def int8_scale(peak_bits):
    """The scale that maps the largest value, given as its `size_bits`, to 127."""
    return (peak_bits.to(tl.float32, bitcast=True) / 127.0).to(tl.bfloat16)


@triton.jit
def divided(values, scale):
    """Compute `values / scale`; zeros where the scale is 0 or not finite."""
    scale = scale.to(tl.float32)
    divides = (scale > 0) & (scale < float("inf"))
    return tl.where(divides, values, 0.0) / tl.where(divides, scale, 1.0)


@triton.jit
def size_bits(values):
    """The bits of absolute values, which order as integers; NaN's are the largest."""
    return tl.abs(values).to(tl.int32, bitcast=True)


@triton.jit
def _e4m3_bits(values):
    size = tl.minimum(tl.abs(values), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # Of the 23 bits of the fraction 3 stay: add half of the rest, less one so that ties go to even.
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    normal = rounded - ((127 - 7) << 3)
    # Below 2 ** -6 values are multiples of 2 ** -9, the last place of 2 ** 14.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
    found = tl.where(size < 0.015625, subnormal, normal)
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    is_number = tl.abs(values) <= float("inf")
    return tl.where(is_number, found | sign, 0x7F).to(tl.uint8)
