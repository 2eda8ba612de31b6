"""The experts of a layer, each applied to the tokens routed to it.

Owns the order of its products, the weighted sum and the reference. Knows nothing of routing.

Shapes: T tokens, I features, F features inside an expert, E experts, C chosen experts of a token,
P = T * C pairs of a token and an expert.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch.nn.functional import gelu, silu

from triptych.core.runtime.kernels.triton.grouped import (
    GATES,
    group_pairs,
    grouped_linear,
    grouped_variant,
)
from triptych.core.runtime.kernels.triton.tiling import (
    NUM_STAGES,
    Tiling,
    are_on_one_device,
    ceil_div,
    choose_tiling,
    product_variant,
)
from triptych.core.runtime.kernels.triton.variant import Variant

_SUM_BLOCK = 1024


def launch_moe_mlp(
    x_TI: torch.Tensor,
    gate_up_EFI: torch.Tensor,
    down_EIF: torch.Tensor,
    weights_TC: torch.Tensor,
    experts_TC: torch.Tensor,
    activation: str,
    deterministic: bool = False,
) -> torch.Tensor:
    """The sum of `weight * down @ (act(gate @ x) * (up @ x))` over a token's experts, `[T, I]`.

    `gate_up_EFI` holds the rows of the gate, then those of the factor: `[E, 2 F, I]`. Weights are
    float32, experts int32. Within an expert, results are in the type of `x_TI`.
    """
    _check(x_TI, gate_up_EFI, down_EIF, weights_TC, experts_TC, activation)
    num_experts, num_hidden = gate_up_EFI.shape[0], down_EIF.shape[2]
    num_pairs = experts_TC.numel()
    tiling = choose_tiling(
        ceil_div(num_pairs, num_experts), num_hidden, 0, is_deterministic=deterministic
    )
    pairs = group_pairs(experts_TC.view(-1), num_experts, tiling.rows)
    num_chosen = experts_TC.shape[1]
    hidden_PF = x_TI.new_empty(num_pairs, num_hidden)
    grouped_linear(
        x_TI, gate_up_EFI, pairs, hidden_PF, tiling, pairs_per_row=num_chosen, gate=activation
    )
    out_PI = x_TI.new_empty(num_pairs, x_TI.shape[1])
    grouped_linear(hidden_PF, down_EIF, pairs, out_PI, tiling)
    return _combine(out_PI, weights_TC)


moe_mlp = torch.library.custom_op(
    "triptych::moe_mlp", launch_moe_mlp, mutates_args=(), device_types="cuda"
)


@moe_mlp.register_fake
def _(
    x_TI: torch.Tensor,
    gate_up_EFI: torch.Tensor,
    down_EIF: torch.Tensor,
    weights_TC: torch.Tensor,
    experts_TC: torch.Tensor,
    activation: str,
    deterministic: bool = False,
) -> torch.Tensor:
    _check(x_TI, gate_up_EFI, down_EIF, weights_TC, experts_TC, activation)
    return x_TI.new_empty(x_TI.shape)


def _check(
    x_TI: torch.Tensor,
    gate_up_EFI: torch.Tensor,
    down_EIF: torch.Tensor,
    weights_TC: torch.Tensor,
    experts_TC: torch.Tensor,
    activation: str,
) -> None:
    num_experts, num_features, num_hidden = down_EIF.shape
    assert are_on_one_device(x_TI, gate_up_EFI, down_EIF, weights_TC, experts_TC)
    assert activation in GATES
    assert x_TI.shape[1] == num_features
    assert gate_up_EFI.shape == (num_experts, 2 * num_hidden, num_features)
    assert x_TI.dtype == gate_up_EFI.dtype == down_EIF.dtype
    assert weights_TC.shape == experts_TC.shape
    assert weights_TC.is_contiguous()


def reference(
    x_TI: torch.Tensor,
    gate_up_EFI: torch.Tensor,
    down_EIF: torch.Tensor,
    weights_TC: torch.Tensor,
    experts_TC: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Compute expert by expert, in float32."""
    out_TI = torch.zeros_like(x_TI, dtype=torch.float32)
    for expert, (gate_up_FI, down_IF) in enumerate(zip(gate_up_EFI, down_EIF, strict=True)):
        tokens, slots = torch.where(experts_TC == expert)
        gate, up = (x_TI[tokens].float() @ gate_up_FI.float().t()).chunk(2, dim=1)
        gate = silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")
        hidden = (gate * up).to(x_TI.dtype).float()
        out = (hidden @ down_IF.float().t()).to(x_TI.dtype).float()
        out_TI.index_add_(0, tokens, out * weights_TC[tokens, slots].unsqueeze(1))
    return out_TI.to(x_TI.dtype)


def _combine(pairs_PI: torch.Tensor, weights_TC: torch.Tensor) -> torch.Tensor:
    (num_tokens, num_chosen), size = weights_TC.shape, pairs_PI.shape[1]
    out_TI = pairs_PI.new_empty(num_tokens, size)
    grid = num_tokens, ceil_div(size, _SUM_BLOCK)
    _combine_kernel[grid](
        pairs_PI,
        weights_TC,
        out_TI,
        size,
        NUM_CHOSEN=num_chosen,
        B=_SUM_BLOCK,
        num_stages=NUM_STAGES,
    )
    return out_TI


@triton.jit
def _combine_kernel(
    pairs_ptr, weights_ptr, out_ptr, size, NUM_CHOSEN: tl.constexpr, B: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for slot in range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + slot
        values = tl.load(pairs_ptr + pair * size + features, mask=features < size, other=0)
        total += tl.load(weights_ptr + pair) * values.to(tl.float32)
    out_ptrs = out_ptr + token * size + features
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=features < size)


def variants() -> tuple[Variant, ...]:
    """Both products of 8 experts of a token, in a batch and in a prompt, and the sum."""
    combine = product_variant(
        "combine",
        _combine_kernel,
        {"pairs_ptr": "*bf16", "weights_ptr": "*fp32", "out_ptr": "*bf16"},
        {"NUM_CHOSEN": 8, "B": _SUM_BLOCK},
    )
    gate_up = partial(grouped_variant, pairs_per_row=8, gate="silu")
    return (
        combine,
        gate_up("gate_up_16", Tiling(16, 64)),
        gate_up("gate_up_128", Tiling(128, 128)),
        grouped_variant("down_16", Tiling(16, 64)),
    )
