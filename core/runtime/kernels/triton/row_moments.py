"""Rows by their own mean values, one row for each program.

Owns the kernels of `core.runtime.kernels.row_moments`. A row is read from the cache again after its
means are known.

Shapes: T tokens, F features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.row_moments import LEAST_SQUARE
from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.variant import Variant

_BLOCK = 1024
_NUM_WARPS = 4
_LEAST = tl.constexpr(LEAST_SQUARE)


def launch_as_large_as(x_TF: torch.Tensor, other_TF: torch.Tensor) -> torch.Tensor:
    """Scale rows to the size of others."""
    out_TF = _new_output(x_TF, other_TF)
    num_rows, num_features = x_TF.shape
    if num_rows:
        _scale[(num_rows,)](
            *(x_TF, other_TF, out_TF, num_features, x_TF.stride(0), other_TF.stride(0)),
            B=_BLOCK,
            num_warps=_NUM_WARPS,
            num_stages=2,
        )
    return out_TF


as_large_as = define_operator("as_large_as", launch_as_large_as)


@fake_of(as_large_as)
def _new_output(x_TF: torch.Tensor, other_TF: torch.Tensor) -> torch.Tensor:
    assert x_TF.shape == other_TF.shape
    assert x_TF.stride(1) == other_TF.stride(1) == 1
    return x_TF.new_empty(x_TF.shape)


def launch_relu_above(x_TF: torch.Tensor, num_deviations: float) -> None:
    """Keep what is above the limit of each row, in place."""
    assert x_TF.stride(1) == 1
    if len(x_TF):
        _keep_above[(len(x_TF),)](
            *(x_TF, x_TF.shape[1], x_TF.stride(0), num_deviations),
            B=_BLOCK,
            num_warps=_NUM_WARPS,
            num_stages=2,
        )


relu_above = define_operator("relu_above", launch_relu_above, mutates=("x_TF",))


@fake_of(relu_above)
def _(x_TF: torch.Tensor, num_deviations: float) -> None:
    return None


@triton.jit
def _mean_square(x_ptr, num_features, mean, B: tl.constexpr):
    """The mean square of the distances from a mean."""
    squares = tl.zeros((B,), tl.float32)
    for first in range(0, num_features, B):
        at = first + tl.arange(0, B)
        is_feature = at < num_features
        x = tl.load(x_ptr + at, mask=is_feature, other=0.0).to(tl.float32)
        distance = tl.where(is_feature, x - mean, 0.0)
        squares += distance * distance
    return tl.sum(squares, 0) / num_features


@triton.jit
def _scale(x_ptr, other_ptr, out_ptr, num_features, x_stride, other_stride, B: tl.constexpr):
    """Scale one row."""
    row = tl.program_id(0).to(tl.int64)
    other_ptr += row * other_stride
    out_ptr += row * num_features
    own = _mean_square(other_ptr, num_features, 0.0, B)
    target = _mean_square(x_ptr + row * x_stride, num_features, 0.0, B)
    factor = tl.sqrt(target / tl.where(own < _LEAST, _LEAST, own))
    for first in range(0, num_features, B):
        at = first + tl.arange(0, B)
        is_feature = at < num_features
        other = tl.load(other_ptr + at, mask=is_feature, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, (other * factor).to(out_ptr.dtype.element_ty), mask=is_feature)


@triton.jit
def _keep_above(x_ptr, num_features, stride, num_deviations, B: tl.constexpr):
    """Replace one row."""
    x_ptr += tl.program_id(0).to(tl.int64) * stride
    sums = tl.zeros((B,), tl.float32)
    for first in range(0, num_features, B):
        at = first + tl.arange(0, B)
        sums += tl.load(x_ptr + at, mask=at < num_features, other=0.0).to(tl.float32)
    mean = tl.sum(sums, 0) / num_features
    limit = mean + tl.sqrt(_mean_square(x_ptr, num_features, mean, B)) * num_deviations
    for first in range(0, num_features, B):
        at = first + tl.arange(0, B)
        is_feature = at < num_features
        x = tl.load(x_ptr + at, mask=is_feature, other=0.0).to(tl.float32)
        above = tl.where(x < limit, 0.0, x - limit)
        tl.store(x_ptr + at, above.to(x_ptr.dtype.element_ty), mask=is_feature)


def variants() -> tuple[Variant, ...]:
    """Both in bfloat16."""
    scaled = {
        **dict.fromkeys(("x_ptr", "other_ptr", "out_ptr"), "*bf16"),
        **dict.fromkeys(("num_features", "x_stride", "other_stride"), "i32"),
    }
    kept = {
        "x_ptr": "*bf16",
        "num_features": "i32",
        "stride": "i32",
        "num_deviations": "fp32",
    }
    return (
        _variant("scale", _scale, scaled),
        _variant("keep_above", _keep_above, kept),
    )


def _variant(name: str, kernel: object, signature: dict[str, str]) -> Variant:
    return Variant(
        name=name,
        kernel=kernel,
        signature=signature | {"B": "constexpr"},
        constants={"B": _BLOCK},
        divisible=frozenset(signature) - {"num_deviations"},
        num_warps=_NUM_WARPS,
        num_stages=2,
    )
