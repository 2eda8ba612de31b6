"""Norm and rotation of queries or keys in one pass.

Owns the kernel of `core.runtime.kernels.norm_rotary`. Results are rounded once; the reference also
rounds between norm and rotation.

Shapes: R rows, T tokens of a row, H heads, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.variant import Variant

_NUM_WARPS = 4
_MAX_VALUES = 16384
"""The most values of a token, with both sizes rounded up to powers of 2."""


def launch(
    x_RTHD: torch.Tensor,
    weight_D: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    out_RTHD: torch.Tensor,
    eps: float,
) -> None:
    """Write the rotated norm of `x_RTHD` to `out_RTHD`."""
    _check(x_RTHD, weight_D, cos_TD, sin_TD, out_RTHD)
    num_rows, num_tokens, num_heads, head_dim = x_RTHD.shape
    block_h, block_d = triton.next_power_of_2(num_heads), triton.next_power_of_2(head_dim)
    assert block_h * block_d <= _MAX_VALUES
    if num_rows * num_tokens:
        _kernel[(num_rows * num_tokens,)](
            x_RTHD,
            weight_D,
            cos_TD,
            sin_TD,
            out_RTHD,
            *x_RTHD.stride()[:3],
            *out_RTHD.stride()[:3],
            num_tokens,
            num_heads,
            head_dim,
            eps,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=_NUM_WARPS,
            num_stages=2,
        )


norm_rotary = define_operator("norm_rotary", launch, mutates=("out_RTHD",))


@fake_of(norm_rotary)
def _(
    x_RTHD: torch.Tensor,
    weight_D: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    out_RTHD: torch.Tensor,
    eps: float,
) -> None:
    _check(x_RTHD, weight_D, cos_TD, sin_TD, out_RTHD)


def _check(
    x_RTHD: torch.Tensor,
    weight_D: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    out_RTHD: torch.Tensor,
) -> None:
    _, num_tokens, _, head_dim = x_RTHD.shape
    assert head_dim % 2 == 0
    assert out_RTHD.shape == x_RTHD.shape
    assert x_RTHD.stride(3) == out_RTHD.stride(3) == 1
    assert weight_D.shape == (head_dim,)
    for angle_TD in (cos_TD, sin_TD):
        assert angle_TD.shape == (num_tokens, head_dim)
        assert angle_TD.is_contiguous()


@triton.jit(do_not_specialize=["num_tokens", "num_heads"])
def _kernel(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    x_row,
    x_token,
    x_head,
    out_row,
    out_token,
    out_head,
    num_tokens,
    num_heads,
    head_dim,
    eps,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Process all heads of one token."""
    row = (tl.program_id(0) // num_tokens).to(tl.int64)
    token = (tl.program_id(0) % num_tokens).to(tl.int64)
    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < head_dim
    is_value = (heads < num_heads) & is_dim[None, :]
    at = row * x_row + token * x_token + heads * x_head + dims[None, :]
    x = tl.load(x_ptr + at, mask=is_value, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / head_dim + eps)
    x = x * scale[:, None] * weight[None, :]
    cos = tl.load(cos_ptr + token * head_dim + dims, mask=is_dim, other=0.0)
    sin = tl.load(sin_ptr + token * head_dim + dims, mask=is_dim, other=0.0)
    even, odd = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_D // 2, 2)))
    cos_even, cos_odd = tl.split(tl.reshape(cos, (BLOCK_D // 2, 2)))
    sin_even, sin_odd = tl.split(tl.reshape(sin, (BLOCK_D // 2, 2)))
    out_even = even * cos_even[None, :] - odd * sin_even[None, :]
    out_odd = odd * cos_odd[None, :] + even * sin_odd[None, :]
    out = tl.reshape(tl.join(out_even, out_odd), (BLOCK_H, BLOCK_D))
    at = row * out_row + token * out_token + heads * out_head + dims[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=is_value)


def variants() -> tuple[Variant, ...]:
    """Up to 32 heads of 128, in bfloat16."""
    pointers = ("x_ptr", "weight_ptr", "out_ptr")
    angles = ("cos_ptr", "sin_ptr")
    strides = ("x_row", "x_token", "x_head", "out_row", "out_token", "out_head")
    counts = ("num_tokens", "num_heads", "head_dim")
    types = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(angles, "*fp32")
    types |= dict.fromkeys((*strides, *counts), "i32") | {"eps": "fp32"}
    constants = {"BLOCK_H": 32, "BLOCK_D": 128}
    types |= dict.fromkeys(constants, "constexpr")
    return (
        Variant(
            name="heads_32x128",
            kernel=_kernel,
            signature={name: types[name] for name in _kernel.arg_names},
            constants=constants,
            divisible=frozenset((*pointers, *angles, *strides, "head_dim")),
            num_warps=_NUM_WARPS,
        ),
    )
