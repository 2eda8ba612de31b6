"""The norm of a recurrent layer's result and its gate, in one pass.

Owns the kernel of `core.runtime.kernels.recurrent.gated_norm`. A program takes one group of one
token, whose result depends on no other.

Shapes: T tokens, O values of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.variant import Variant


def launch(
    y_TO: torch.Tensor,
    z_TO: torch.Tensor,
    weight: torch.Tensor,
    size: int,
    eps: float,
    place: str,
    gate: str = "silu",
    gate_scale: float = 1.0,
) -> torch.Tensor:
    """The norm of each `size` values and the gate; the norm is "first", "last" or "none".

    The gate is "silu" or "sigmoid". The result has the type of `z_TO`. The weight has O values, or
    those that all groups share.
    """
    out_TO = _new_output(y_TO, z_TO, weight, size)
    block = triton.next_power_of_2(size)
    _kernel[(len(y_TO), y_TO.shape[1] // size)](
        *(y_TO, z_TO, weight, out_TO, y_TO.stride(0), z_TO.stride(0), out_TO.stride(0)),
        *(0 if weight.numel() == size else size, size, eps, gate_scale),
        PLACE=place,
        GATE=gate,
        BLOCK=block,
        num_warps=_num_warps(block),
        num_stages=2,
    )
    return out_TO


gated_norm = define_operator("gated_norm", launch)


@fake_of(gated_norm)
def _(
    y_TO: torch.Tensor,
    z_TO: torch.Tensor,
    weight: torch.Tensor,
    size: int,
    eps: float,
    place: str,
    gate: str = "silu",
    gate_scale: float = 1.0,
) -> torch.Tensor:
    return _new_output(y_TO, z_TO, weight, size)


def _new_output(
    y_TO: torch.Tensor, z_TO: torch.Tensor, weight: torch.Tensor, size: int
) -> torch.Tensor:
    assert y_TO.shape == z_TO.shape
    assert y_TO.stride(1) == z_TO.stride(1) == weight.stride(0) == 1
    assert y_TO.shape[1] % size == 0
    assert weight.shape in {(size,), y_TO.shape[1:]}
    return z_TO.new_empty(z_TO.shape)


def _num_warps(block: int) -> int:
    """About sixteen values for each thread."""
    return min(max(block // 512, 1), 16)


@triton.jit
def _kernel(
    y_ptr, z_ptr, weight_ptr, out_ptr, y_stride, z_stride, out_stride, weight_stride, size, eps,
    gate_scale, PLACE: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    is_value, place = at < size, group * size + at
    y = tl.load(y_ptr + token * y_stride + place, mask=is_value, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + token * z_stride + place, mask=is_value, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + group * weight_stride + at, mask=is_value, other=0.0)
    z *= gate_scale
    gate = tl.sigmoid(z)
    if GATE == "silu":
        gate *= z
    if PLACE != "first":
        y *= gate
    if PLACE != "none":
        y *= tl.rsqrt(tl.sum(y * y, axis=0) / size + eps)
    y *= weight
    if PLACE == "first":
        y *= gate
    out_ptrs = out_ptr + token * out_stride + place
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=is_value)


def variants() -> tuple[Variant, ...]:
    """Mamba 2's of Granite 4, those of Qwen3.5's heads and of Kimi Linear's, in bfloat16."""
    pointers = {"y_ptr": "*fp32", "z_ptr": "*bf16", "weight_ptr": "*fp32", "out_ptr": "*bf16"}
    sizes = dict.fromkeys(("y_stride", "z_stride", "out_stride", "weight_stride", "size"), "i32")
    return tuple(
        Variant(
            name=name,
            kernel=_kernel,
            signature={
                **pointers,
                **sizes,
                "eps": "fp32",
                "gate_scale": "fp32",
                **dict.fromkeys(("PLACE", "GATE", "BLOCK"), "constexpr"),
            },
            constants={"PLACE": place, "GATE": gate, "BLOCK": block},
            divisible=frozenset((*pointers, *sizes)),
            num_warps=_num_warps(block),
        )
        for name, place, gate, block in (
            ("mamba_8192", "last", "silu", 8192),
            ("heads_128", "first", "silu", 128),
            ("sigmoid_128", "first", "sigmoid", 128),
        )
    )
