"""RMSNorm of a sum: adds a layer's output to the residual stream and normalizes it in one pass.

Owns the kernel of `core.runtime.kernels.rms_norm`. The sum is rounded to the type of the stream
before it is normalized, and the normalized value to the type of the weight before it is scaled,
exactly as in the torch reference.

Shapes: T tokens, C features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.variant import Variant

_MAX_FEATURES = 65536


def launch_rms_norm(x_TC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize and scale `x_TC`, in its own type."""
    _check(x_TC, weight_C)
    normed_TC = x_TC.new_empty(x_TC.shape)
    _launch(x_TC, None, weight_C, normed_TC, None, eps)
    return normed_TC


rms_norm = define_operator("rms_norm", launch_rms_norm)


@fake_of(rms_norm)
def _(x_TC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    _check(x_TC, weight_C)
    return x_TC.new_empty(x_TC.shape)


def launch_add_rms_norm(
    x_TC: torch.Tensor, residual_TC: torch.Tensor, weight_C: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalized sum, and the sum."""
    _check(x_TC, weight_C, residual_TC)
    normed_TC, sum_TC = x_TC.new_empty(x_TC.shape), x_TC.new_empty(x_TC.shape)
    _launch(x_TC, residual_TC, weight_C, normed_TC, sum_TC, eps)
    return normed_TC, sum_TC


add_rms_norm = define_operator("add_rms_norm", launch_add_rms_norm)


@fake_of(add_rms_norm)
def _(
    x_TC: torch.Tensor, residual_TC: torch.Tensor, weight_C: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x_TC, weight_C, residual_TC)
    return x_TC.new_empty(x_TC.shape), x_TC.new_empty(x_TC.shape)


def _check(
    x_TC: torch.Tensor, weight_C: torch.Tensor, residual_TC: torch.Tensor | None = None
) -> None:
    assert x_TC.dim() == 2
    assert x_TC.stride(1) == 1
    assert x_TC.shape[1] <= _MAX_FEATURES
    assert weight_C.shape == x_TC.shape[1:]
    assert weight_C.is_contiguous()
    if residual_TC is not None:
        assert residual_TC.shape == x_TC.shape
        assert residual_TC.dtype == x_TC.dtype
        assert residual_TC.stride(1) == 1


def _launch(
    x_TC: torch.Tensor,
    residual_TC: torch.Tensor | None,
    weight_C: torch.Tensor,
    normed_TC: torch.Tensor,
    sum_TC: torch.Tensor | None,
    eps: float,
) -> None:
    num_tokens, num_features = x_TC.shape
    if not num_tokens:
        return
    block = triton.next_power_of_2(num_features)
    _kernel[(num_tokens,)](
        x_TC,
        residual_TC,
        weight_C,
        normed_TC,
        sum_TC,
        x_TC.stride(0),
        0 if residual_TC is None else residual_TC.stride(0),
        num_features,
        eps,
        BLOCK_C=block,
        num_warps=_num_warps(block),
        num_stages=2,
    )


def _num_warps(block: int) -> int:
    """About sixteen features for each thread."""
    return min(max(block // 512, 1), 16)


@triton.jit
def _kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    sum_ptr,
    x_stride,
    residual_stride,
    num_features,
    eps,
    BLOCK_C: tl.constexpr,
):
    """Process one token. Without a residual, its pointer and that of the sum are `None`."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_C)
    is_feature = columns < num_features
    x = tl.load(x_ptr + token * x_stride + columns, mask=is_feature, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(
            residual_ptr + token * residual_stride + columns, mask=is_feature, other=0.0
        )
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + token * num_features + columns, x, mask=is_feature)
    values = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / num_features + eps)
    weight = tl.load(weight_ptr + columns, mask=is_feature, other=0.0)
    normed = (values * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(
        normed_ptr + token * num_features + columns,
        normed.to(normed_ptr.dtype.element_ty),
        mask=is_feature,
    )


def variants() -> tuple[Variant, ...]:
    """A layer's norms in bfloat16, and a stack's first one with centred weights."""
    sizes = ("x_stride", "residual_stride", "num_features")
    aligned = frozenset({"x_ptr", "residual_ptr", "weight_ptr", "normed_ptr", "sum_ptr", *sizes})
    return tuple(
        Variant(
            name=name,
            kernel=_kernel,
            signature={
                "x_ptr": "*bf16",
                "residual_ptr": "*bf16" if has_residual else "constexpr",
                "weight_ptr": weight,
                "normed_ptr": "*bf16",
                "sum_ptr": "*bf16" if has_residual else "constexpr",
                **dict.fromkeys(sizes, "i32"),
                "eps": "fp32",
                "BLOCK_C": "constexpr",
            },
            constants={"BLOCK_C": block}
            | ({} if has_residual else {"residual_ptr": None, "sum_ptr": None}),
            divisible=aligned if has_residual else aligned - {"residual_ptr", "sum_ptr"},
            num_warps=_num_warps(block),
        )
        for name, has_residual, weight, block in (
            ("add_4096", True, "*bf16", 4096),
            ("add_16384", True, "*bf16", 16384),
            ("centred_4096", False, "*fp32", 4096),
        )
    )
