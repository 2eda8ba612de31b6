"""GELU, and other inputs to its left, quantized to rows of a float8 product in one pass.

Owns the kernel of `core.runtime.kernels.gelu_rows`: a row is read twice, the second time from the
cache, and GELU computed twice, which takes less time than writing it.

Shapes: T rows, F features before GELU, N other inputs, I = N + F.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.float8 import as_stored, to_stored
from triptych.core.runtime.kernels.triton.gated import tanh_gelu
from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.variant import Variant

_BLOCK = 2048
_NUM_WARPS = 8
_LARGEST = tl.constexpr(448.0)


def launch(
    x_TF: torch.Tensor, left_TN: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in float8 and their scales, `[T, 1]`."""
    quantized_TI, scale_T1 = _new_outputs(x_TF, left_TN)
    if len(x_TF):
        _kernel[(len(x_TF),)](
            left_TN,
            x_TF,
            as_stored(quantized_TI),
            scale_T1,
            0 if left_TN is None else left_TN.shape[1],
            x_TF.shape[1],
            0 if left_TN is None else left_TN.stride(0),
            x_TF.stride(0),
            B=_BLOCK,
            num_warps=_NUM_WARPS,
            num_stages=2,
        )
    return quantized_TI, scale_T1


quantize_gelu_rows = define_operator("quantize_gelu_rows", launch)


@fake_of(quantize_gelu_rows)
def _new_outputs(
    x_TF: torch.Tensor, left_TN: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_inputs = x_TF.shape
    for each in (x_TF, left_TN):
        assert each is None or (each.stride(1) == 1 and len(each) == num_rows)
    num_inputs += 0 if left_TN is None else left_TN.shape[1]
    quantized_TI = x_TF.new_empty(num_rows, num_inputs, dtype=torch.float8_e4m3fn)
    return quantized_TI, x_TF.new_empty(num_rows, 1, dtype=torch.float32)


@triton.jit
def _kernel(
    left_ptr,
    x_ptr,
    out_ptr,
    scale_ptr,
    num_left,
    num_features,
    left_stride,
    x_stride,
    B: tl.constexpr,
):
    """Process one row. Without inputs to the left, their pointer is `None`."""
    row = tl.program_id(0).to(tl.int64)
    out_ptr += row * (num_left + num_features)
    largest = tl.zeros((B,), tl.float32)
    sum_of_zeros = tl.zeros((B,), tl.float32)  # NaN for a value that is not finite
    if left_ptr is not None:
        for first in range(0, num_left, B):
            at = first + tl.arange(0, B)
            values = tl.load(left_ptr + row * left_stride + at, mask=at < num_left, other=0.0)
            values = values.to(tl.float32)
            largest = tl.maximum(largest, tl.abs(values))
            sum_of_zeros += values * 0.0
    for first in range(0, num_features, B):
        at = first + tl.arange(0, B)
        values = _gelu(x_ptr + row * x_stride, at, num_features)
        largest = tl.maximum(largest, tl.abs(values))
        sum_of_zeros += values * 0.0
    peak = tl.max(largest, 0)
    scale = tl.where(peak == 0, 1.0, peak / _LARGEST) + tl.sum(sum_of_zeros, 0)
    tl.store(scale_ptr + row, scale)
    if left_ptr is not None:
        for first in range(0, num_left, B):
            at = first + tl.arange(0, B)
            values = tl.load(left_ptr + row * left_stride + at, mask=at < num_left, other=0.0)
            quantized = to_stored(values.to(tl.float32) / scale, out_ptr.dtype.element_ty)
            tl.store(out_ptr + at, quantized, mask=at < num_left)
    for first in range(0, num_features, B):
        at = first + tl.arange(0, B)
        values = _gelu(x_ptr + row * x_stride, at, num_features)
        quantized = to_stored(values / scale, out_ptr.dtype.element_ty)
        tl.store(out_ptr + num_left + at, quantized, mask=at < num_features)


@triton.jit
def _gelu(row_ptr, at, num_features):
    return tanh_gelu(tl.load(row_ptr + at, mask=at < num_features, other=0.0).to(tl.float32))


def variants() -> tuple[Variant, ...]:
    """GELU alone, and with inputs to its left, in bfloat16."""
    return (_variant("gelu", has_left=False), _variant("left_gelu", has_left=True))


def _variant(name: str, *, has_left: bool) -> Variant:
    counts = ("num_left", "num_features", "left_stride", "x_stride")
    signature = {
        "left_ptr": "*bf16" if has_left else "constexpr",
        "x_ptr": "*bf16",
        "out_ptr": "*u8",
        "scale_ptr": "*fp32",
        **dict.fromkeys(counts, "i32"),
        "B": "constexpr",
    }
    return Variant(
        name=name,
        kernel=_kernel,
        signature=signature,
        constants={"B": _BLOCK} | ({} if has_left else {"left_ptr": None}),
        divisible=frozenset(signature) - {"B"} - ({"left_ptr"} if not has_left else set()),
        num_warps=_NUM_WARPS,
    )
