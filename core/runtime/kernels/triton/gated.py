"""The gates of MLPs in one pass: `act(gate) * up`.

Owns the kernel of `core.runtime.kernels.gated`. The product is rounded once; the reference also
rounds the activation.

Shapes: T tokens, F features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.variant import Variant

_BLOCK_F = 1024
_NUM_WARPS = 4


def launch(gate_up_T2F: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    """Apply SwiGLU, or GeGLU of the tanh kind."""
    out_TF = _new_output(gate_up_T2F)
    num_tokens, num_features = out_TF.shape
    if num_tokens:
        _kernel[(num_tokens, triton.cdiv(num_features, _BLOCK_F))](
            gate_up_T2F,
            out_TF,
            gate_up_T2F.stride(0),
            num_features,
            IS_GELU=is_gelu,
            BLOCK_F=_BLOCK_F,
            num_warps=_NUM_WARPS,
            num_stages=2,
        )
    return out_TF


gated = define_operator("gated", launch)


@fake_of(gated)
def _(gate_up_T2F: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    return _new_output(gate_up_T2F)


def _new_output(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    num_tokens, num_halves = gate_up_T2F.shape
    assert num_halves % 2 == 0
    assert gate_up_T2F.stride(1) == 1
    return gate_up_T2F.new_empty(num_tokens, num_halves // 2)


@triton.jit
def activated(gate, IS_GELU: tl.constexpr):
    """SiLU, or GELU of the tanh kind, of float32."""
    # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if IS_GELU else gate
    return gate * tl.sigmoid(inner)


@triton.jit
def _kernel(
    gate_up_ptr, out_ptr, stride, num_features, IS_GELU: tl.constexpr, BLOCK_F: tl.constexpr
):
    """Compute some features of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    is_feature = columns < num_features
    row = gate_up_ptr + token * stride
    gate = tl.load(row + columns, mask=is_feature, other=0.0).to(tl.float32)
    up = tl.load(row + num_features + columns, mask=is_feature, other=0.0).to(tl.float32)
    out = activated(gate, IS_GELU) * up
    tl.store(
        out_ptr + token * num_features + columns, out.to(out_ptr.dtype.element_ty), mask=is_feature
    )


def variants() -> tuple[Variant, ...]:
    """Both activations, in bfloat16."""
    return tuple(
        Variant(
            name=name,
            kernel=_kernel,
            signature={
                "gate_up_ptr": "*bf16",
                "out_ptr": "*bf16",
                "stride": "i32",
                "num_features": "i32",
                "IS_GELU": "constexpr",
                "BLOCK_F": "constexpr",
            },
            constants={"IS_GELU": is_gelu, "BLOCK_F": _BLOCK_F},
            divisible=frozenset({"gate_up_ptr", "out_ptr", "stride", "num_features"}),
            num_warps=_NUM_WARPS,
        )
        for name, is_gelu in (("silu", False), ("gelu", True))
    )
