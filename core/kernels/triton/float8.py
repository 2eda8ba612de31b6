"""Float8 (e4m3) as its bits: a conversion that every GPU can do, whatever its instructions.

Owns the conversion both ways. Writing rounds to nearest even; what lies beyond the range saturates,
and NaN stays NaN. Storage is seen as uint8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def as_stored(pages: torch.Tensor) -> torch.Tensor:
    """The tensor as a kernel takes it: float8 as its bits, everything else as it is."""
    return pages.view(torch.uint8) if pages.dtype is torch.float8_e4m3fn else pages


@triton.jit
def to_stored(values, dtype: tl.constexpr):
    """Float32 as values of storage: cast to `dtype`, or the bits of float8 where that is uint8."""
    if dtype == tl.uint8:
        return _e4m3_bits(values)
    else:
        return values.to(dtype)


@triton.jit
def dequantized(x, DTYPE: tl.constexpr):
    """Stored values as `DTYPE`. `uint8` holds the bits of float8, of which NaN reads as 480."""
    if x.dtype == tl.uint8:
        # Put where float32 has sign, exponent and fraction: the same number, divided by 2^120.
        bits = x.to(tl.uint32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        x = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return x.to(DTYPE)


@triton.jit
def _e4m3_bits(values):
    size = tl.minimum(tl.abs(values), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # Of the 23 bits of the fraction 3 stay: add half of the rest, less one to leave even as it is.
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    normal = rounded - ((127 - 7) << 3)
    # Below 2 ** -6 values are multiples of 2 ** -9, the last place of 2 ** 14.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
    found = tl.where(size < 0.015625, subnormal, normal)
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    is_number = tl.abs(values) <= float("inf")
    return tl.where(is_number, found | sign, 0x7F).to(tl.uint8)
