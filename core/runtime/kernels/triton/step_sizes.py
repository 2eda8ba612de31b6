"""The step sizes of recurrences, as kernels compute them.

Owns softplus. Logarithms of a GPU are exact to about 2^-22 near 1, too little for the small steps
that most heads take, so the logarithm of such steps is summed as a series.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """`log(1 + exp(x))` of float32, to a few units of the last place."""
    power = tl.exp(tl.minimum(x, 20.0))
    # log(1 + p) = 2 artanh(p / (2 + p)); to p = 1/2 the next term of the sum is below 2^-26 of it.
    part = power / (2.0 + power)
    square = part * part
    tail = square * (1.0 / 7.0 + square * (1.0 / 9.0 + square / 11.0))
    small = 2.0 * part * (1.0 + square * (1.0 / 3.0 + square * (1.0 / 5.0 + tail)))
    return tl.where(x > 20.0, x, tl.where(power < 0.5, small, tl.log(1.0 + power)))
