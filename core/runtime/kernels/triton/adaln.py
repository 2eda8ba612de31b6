"""Adaptive normalization in one pass: gated residual, norm, scale and shift.

Owns the kernel of `core.runtime.kernels.adaln`. Results are rounded once; the reference rounds
after each operation. The sum of the residual is rounded before it is normalized.

Shapes: R rows, T tokens of a row, C features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.variant import Variant

_MAX_FEATURES = 65536


def launch_modulated_norm(
    x_RTC: torch.Tensor,
    scale_RC: torch.Tensor,
    shift_RC: torch.Tensor,
    eps: float,
    is_rms: bool,
) -> torch.Tensor:
    """The modulated norm, in the type of `x_RTC`."""
    _check(x_RTC, scale_RC, shift_RC)
    x_RTC = x_RTC.contiguous()
    normed_RTC = torch.empty_like(x_RTC)
    _launch(x_RTC, (None, None), scale_RC, shift_RC, (normed_RTC, None), eps, is_rms)
    return normed_RTC


modulated_norm = define_operator("modulated_norm", launch_modulated_norm)


@fake_of(modulated_norm)
def _(
    x_RTC: torch.Tensor,
    scale_RC: torch.Tensor,
    shift_RC: torch.Tensor,
    eps: float,
    is_rms: bool,
) -> torch.Tensor:
    _check(x_RTC, scale_RC, shift_RC)
    return x_RTC.new_empty(x_RTC.shape)


def launch_gated_modulated_norm(
    x_RTC: torch.Tensor,
    y_RTC: torch.Tensor,
    gate_RC: torch.Tensor,
    scale_RC: torch.Tensor,
    shift_RC: torch.Tensor,
    eps: float,
    is_rms: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The modulated norm of `x + gate * y`, and the sum."""
    _check(x_RTC, scale_RC, shift_RC, gate_RC)
    x_RTC, y_RTC = x_RTC.contiguous(), y_RTC.contiguous()
    normed_RTC, sum_RTC = torch.empty_like(x_RTC), torch.empty_like(x_RTC)
    _launch(x_RTC, (y_RTC, gate_RC), scale_RC, shift_RC, (normed_RTC, sum_RTC), eps, is_rms)
    return normed_RTC, sum_RTC


gated_modulated_norm = define_operator("gated_modulated_norm", launch_gated_modulated_norm)


@fake_of(gated_modulated_norm)
def _(
    x_RTC: torch.Tensor,
    y_RTC: torch.Tensor,
    gate_RC: torch.Tensor,
    scale_RC: torch.Tensor,
    shift_RC: torch.Tensor,
    eps: float,
    is_rms: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x_RTC, scale_RC, shift_RC, gate_RC)
    assert y_RTC.shape == x_RTC.shape
    return x_RTC.new_empty(x_RTC.shape), x_RTC.new_empty(x_RTC.shape)


def _launch(
    x_RTC: torch.Tensor,
    residual: tuple[torch.Tensor, torch.Tensor] | tuple[None, None],
    scale_RC: torch.Tensor,
    shift_RC: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor | None],
    eps: float,
    is_rms: bool,
) -> None:
    y_RTC, gate_RC = residual
    normed_RTC, sum_RTC = outputs
    num_rows, num_tokens, num_features = x_RTC.shape
    block = triton.next_power_of_2(num_features)
    if num_rows * num_tokens:
        _kernel[(num_rows * num_tokens,)](
            x_RTC,
            y_RTC,
            gate_RC,
            scale_RC,
            shift_RC,
            normed_RTC,
            sum_RTC,
            0 if gate_RC is None else gate_RC.stride(0),
            scale_RC.stride(0),
            shift_RC.stride(0),
            num_tokens,
            num_features,
            eps,
            IS_RMS=is_rms,
            BLOCK_C=block,
            num_warps=_num_warps(block),
            num_stages=2,
        )


def _check(x_RTC: torch.Tensor, *of_rows: torch.Tensor) -> None:
    assert x_RTC.dim() == 3
    assert x_RTC.shape[2] <= _MAX_FEATURES
    for tensor_RC in of_rows:
        assert tensor_RC.shape == (x_RTC.shape[0], x_RTC.shape[2])
        assert tensor_RC.stride(1) == 1


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


@triton.jit(do_not_specialize=["num_tokens"])
def _kernel(
    x_ptr,
    y_ptr,
    gate_ptr,
    scale_ptr,
    shift_ptr,
    normed_ptr,
    sum_ptr,
    gate_stride,
    scale_stride,
    shift_stride,
    num_tokens,
    num_features,
    eps,
    IS_RMS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Process one token. Without a residual, its pointers and that of the sum are `None`."""
    token = tl.program_id(0).to(tl.int64)
    row = token // num_tokens
    columns = tl.arange(0, BLOCK_C)
    is_feature = columns < num_features
    at = token * num_features + columns
    x = tl.load(x_ptr + at, mask=is_feature, other=0.0)
    if y_ptr is not None:
        y = tl.load(y_ptr + at, mask=is_feature, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + row * gate_stride + columns, mask=is_feature, other=0.0)
        x = (x.to(tl.float32) + gate.to(tl.float32) * y).to(x.dtype)
        tl.store(sum_ptr + at, x, mask=is_feature)
    values = x.to(tl.float32)
    if not IS_RMS:
        values = tl.where(is_feature, values - tl.sum(values, axis=0) / num_features, 0.0)
    values *= tl.rsqrt(tl.sum(values * values, axis=0) / num_features + eps)
    scale = tl.load(scale_ptr + row * scale_stride + columns, mask=is_feature, other=0.0)
    shift = tl.load(shift_ptr + row * shift_stride + columns, mask=is_feature, other=0.0)
    normed = values * (1 + scale.to(tl.float32)) + shift.to(tl.float32)
    tl.store(normed_ptr + at, normed.to(normed_ptr.dtype.element_ty), mask=is_feature)


def variants() -> tuple[Variant, ...]:
    """A layer norm alone, one after a gated residual, and the root-mean-square kind."""
    return (
        _variant("layer_norm_4096", has_residual=False, is_rms=False),
        _variant("gated_layer_norm_4096", has_residual=True, is_rms=False),
        _variant("gated_rms_norm_4096", has_residual=True, is_rms=True),
    )


def _variant(name: str, *, has_residual: bool, is_rms: bool) -> Variant:
    of_residual = ("y_ptr", "gate_ptr", "sum_ptr")
    constants: dict[str, object] = {"IS_RMS": is_rms, "BLOCK_C": 4096}
    constants |= {} if has_residual else dict.fromkeys(of_residual)
    pointers = ("x_ptr", "y_ptr", "gate_ptr", "scale_ptr", "shift_ptr", "normed_ptr", "sum_ptr")
    strides = ("gate_stride", "scale_stride", "shift_stride")
    counts = {"num_tokens": "i32", "num_features": "i32", "eps": "fp32"}
    signature = {
        **dict.fromkeys(pointers, "*bf16"),
        **dict.fromkeys(strides, "i32"),
        **counts,
        **dict.fromkeys(constants, "constexpr"),
    }
    return Variant(
        name=name,
        kernel=_kernel,
        signature=signature,
        constants=constants,
        divisible=frozenset((*pointers, *strides, "num_features")) - constants.keys(),
        num_warps=_num_warps(4096),
    )
