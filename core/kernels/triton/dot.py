"""The product of two tiles, on every device and under Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

IS_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, total):
    """`total + a @ b`, in float32; float32 operands are not rounded."""
    if IS_INTERPRETED and a.dtype == tl.bfloat16:  # whose bits numpy would multiply as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")
