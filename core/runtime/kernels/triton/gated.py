"""The gates of MLPs in one pass: `act(gate) * up`.

Owns the kernel of `core.runtime.kernels.gated`, and the gates of products of experts. The product
is rounded once; the reference also rounds the activation.

Shapes: T tokens, F features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.variant import Variant

_BLOCK_F = 1024
_NUM_WARPS = 4
GATES = ("silu", "gelu_tanh", "relu2", "clamped_silu")


class GateRule(NamedTuple):
    """A gate as a constant of kernels: one of `GATES`, and the numbers of a clamped one.

    They are those of `core.runtime.kernels.gated.SwigluClamp`. Without a factor it is an activation
    alone.
    """

    kind: str
    alpha: float = 0.0
    limit: float = 0.0
    has_factor: bool = True


GPT_OSS_GATE = GateRule("clamped_silu", 1.702, 7.0)
"""For variants."""


def launch(
    gate_up_T2F: torch.Tensor, kind: str, alpha: float = 0.0, limit: float = 0.0
) -> torch.Tensor:
    """Apply a gate of `GATES`."""
    assert kind in GATES
    out_TF = _new_output(gate_up_T2F)
    num_tokens, num_features = out_TF.shape
    if num_tokens:
        _kernel[(num_tokens, triton.cdiv(num_features, _BLOCK_F))](
            gate_up_T2F,
            out_TF,
            gate_up_T2F.stride(0),
            num_features,
            GATE=GateRule(kind, alpha, limit),
            BLOCK_F=_BLOCK_F,
            num_warps=_NUM_WARPS,
            num_stages=2,
        )
    return out_TF


gated = define_operator("gated", launch)


@fake_of(gated)
def _(gate_up_T2F: torch.Tensor, kind: str, alpha: float = 0.0, limit: float = 0.0) -> torch.Tensor:
    return _new_output(gate_up_T2F)


def _new_output(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    num_tokens, num_halves = gate_up_T2F.shape
    assert num_halves % 2 == 0
    assert gate_up_T2F.stride(1) == 1
    return gate_up_T2F.new_empty(num_tokens, num_halves // 2)


@triton.constexpr_function
def has_factor(gate):
    """Whether a product is a gate, if any, and what it multiplies: two values for each result."""
    return gate is not None and gate[3]


@triton.jit
def tanh_gelu(x):
    """GELU of the tanh kind, of float32."""
    # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def gate_product(gate, up, GATE: tl.constexpr):
    """The gate of float32, times what it gates. Values that are not numbers pass every limit."""
    KIND: tl.constexpr = GATE[0]
    if KIND == "gelu_tanh":
        return tanh_gelu(gate) * up
    elif KIND == "relu2":
        positive = tl.where(gate < 0.0, 0.0, gate)
        return positive * positive * up
    elif KIND == "clamped_silu":
        ALPHA: tl.constexpr = GATE[1]
        LIMIT: tl.constexpr = GATE[2]
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return gate * tl.sigmoid(ALPHA * gate) * (up + 1.0)
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit
def _kernel(gate_up_ptr, out_ptr, stride, num_features, GATE: tl.constexpr, BLOCK_F: tl.constexpr):
    """Compute some features of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    is_feature = columns < num_features
    row = gate_up_ptr + token * stride
    gate = tl.load(row + columns, mask=is_feature, other=0.0).to(tl.float32)
    up = tl.load(row + num_features + columns, mask=is_feature, other=0.0).to(tl.float32)
    out = gate_product(gate, up, GATE)
    tl.store(
        out_ptr + token * num_features + columns, out.to(out_ptr.dtype.element_ty), mask=is_feature
    )


def variants() -> tuple[Variant, ...]:
    """The gates in bfloat16; the limits are those of gpt-oss."""
    return tuple(
        Variant(
            name=name,
            kernel=_kernel,
            signature={
                "gate_up_ptr": "*bf16",
                "out_ptr": "*bf16",
                "stride": "i32",
                "num_features": "i32",
                "GATE": "constexpr",
                "BLOCK_F": "constexpr",
            },
            constants={"GATE": gate, "BLOCK_F": _BLOCK_F},
            divisible=frozenset({"gate_up_ptr", "out_ptr", "stride", "num_features"}),
            num_warps=_NUM_WARPS,
        )
        for name, gate in (
            ("silu", GateRule("silu")),
            ("gelu", GateRule("gelu_tanh")),
            ("relu2", GateRule("relu2")),
            ("clamped", GPT_OSS_GATE),
        )
    )
