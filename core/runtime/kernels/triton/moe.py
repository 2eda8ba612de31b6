"""The experts of a layer, each applied to the tokens routed to it.

Owns the order of its products, the weighted sum and the reference. Knows nothing of routing.

Shapes: T tokens, I features, F features inside an expert, E experts, C chosen experts of a token,
P = T * C pairs of a token and an expert.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from torch.nn.functional import gelu, silu

from triptych.core.runtime.kernels.stacked_weights import PLAIN, StackedWeight
from triptych.core.runtime.kernels.triton.grouped import (
    GATES,
    GroupedPairs,
    group_pairs,
    grouped_linear,
    grouped_variant,
)
from triptych.core.runtime.kernels.triton.grouped_packed import (
    fitting_tiling,
    packed_grouped_linear,
)
from triptych.core.runtime.kernels.triton.operator import define_operator, fake_of
from triptych.core.runtime.kernels.triton.tiling import (
    NUM_STAGES,
    Tiling,
    are_on_one_device,
    ceil_div,
    choose_tiling,
    product_variant,
)
from triptych.core.runtime.kernels.triton.variant import Variant

ExpertWeight: TypeAlias = torch.Tensor | StackedWeight

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
    return _run(x_TI, gate_up_EFI, down_EIF, weights_TC, experts_TC, activation, deterministic)


def _run(
    x_TI: torch.Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    weights_TC: torch.Tensor,
    experts_TC: torch.Tensor,
    activation: str,
    deterministic: bool,
) -> torch.Tensor:
    num_experts, num_features, num_hidden = down.shape
    num_pairs, num_chosen = experts_TC.numel(), experts_TC.shape[1]
    tiling = choose_tiling(
        ceil_div(num_pairs, num_experts), num_hidden, 0, is_deterministic=deterministic
    )
    forms = (each.form for each in (gate_up, down) if isinstance(each, StackedWeight))
    tiling = fitting_tiling(tiling, *forms)
    pairs = group_pairs(experts_TC.view(-1), num_experts, tiling.rows)
    hidden_PF = x_TI.new_empty(num_pairs, num_hidden)
    _multiply(x_TI, gate_up, pairs, hidden_PF, tiling, pairs_per_row=num_chosen, gate=activation)
    out_PI = x_TI.new_empty(num_pairs, num_features)
    _multiply(hidden_PF, down, pairs, out_PI, tiling)
    return launch_combine(out_PI, weights_TC)


def _multiply(
    x_RI: torch.Tensor,
    weight: ExpertWeight,
    pairs: GroupedPairs,
    out_PO: torch.Tensor,
    tiling: Tiling,
    *,
    pairs_per_row: int = 1,
    gate: str | None = None,
) -> None:
    options: dict[str, Any] = {"pairs_per_row": pairs_per_row, "gate": gate}
    if isinstance(weight, StackedWeight) and weight.form != PLAIN:
        packed_grouped_linear(x_RI, weight, pairs, out_PO, tiling, **options)
    else:
        plain_EOI = weight if isinstance(weight, torch.Tensor) else weight.tensors[0]
        grouped_linear(x_RI, plain_EOI, pairs, out_PO, tiling, **options)


moe_mlp = define_operator("moe_mlp", launch_moe_mlp)


@fake_of(moe_mlp)
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


def launch_packed_moe_mlp(
    x_TI: torch.Tensor,
    gate_up: list[torch.Tensor],
    gate_up_form: str,
    down: list[torch.Tensor],
    down_form: str,
    weights_TC: torch.Tensor,
    experts_TC: torch.Tensor,
    activation: str,
    deterministic: bool = False,
) -> torch.Tensor:
    """As `launch_moe_mlp`, of the tensors and forms of two `StackedWeight`."""
    stacked = StackedWeight(gate_up_form, tuple(gate_up)), StackedWeight(down_form, tuple(down))
    _check_packed(x_TI, *stacked, weights_TC, experts_TC, activation)
    return _run(x_TI, *stacked, weights_TC, experts_TC, activation, deterministic)


packed_moe_mlp = define_operator("packed_moe_mlp", launch_packed_moe_mlp)


@fake_of(packed_moe_mlp)
def _(
    x_TI: torch.Tensor,
    gate_up: list[torch.Tensor],
    gate_up_form: str,
    down: list[torch.Tensor],
    down_form: str,
    weights_TC: torch.Tensor,
    experts_TC: torch.Tensor,
    activation: str,
    deterministic: bool = False,
) -> torch.Tensor:
    stacked = StackedWeight(gate_up_form, tuple(gate_up)), StackedWeight(down_form, tuple(down))
    _check_packed(x_TI, *stacked, weights_TC, experts_TC, activation)
    return x_TI.new_empty(x_TI.shape)


def _check_packed(
    x_TI: torch.Tensor,
    gate_up: StackedWeight,
    down: StackedWeight,
    weights_TC: torch.Tensor,
    experts_TC: torch.Tensor,
    activation: str,
) -> None:
    tensors = *gate_up.tensors, *down.tensors, weights_TC, experts_TC
    assert are_on_one_device(x_TI, *tensors)
    _check_shapes(x_TI, gate_up.shape, down.shape, weights_TC, experts_TC, activation)


def _check(
    x_TI: torch.Tensor,
    gate_up_EFI: torch.Tensor,
    down_EIF: torch.Tensor,
    weights_TC: torch.Tensor,
    experts_TC: torch.Tensor,
    activation: str,
) -> None:
    assert are_on_one_device(x_TI, gate_up_EFI, down_EIF, weights_TC, experts_TC)
    assert x_TI.dtype == gate_up_EFI.dtype == down_EIF.dtype
    _check_shapes(x_TI, gate_up_EFI.shape, down_EIF.shape, weights_TC, experts_TC, activation)


def _check_shapes(
    x_TI: torch.Tensor,
    gate_up_EFI: tuple[int, ...],
    down_EIF: tuple[int, ...],
    weights_TC: torch.Tensor,
    experts_TC: torch.Tensor,
    activation: str,
) -> None:
    num_experts, num_features, num_hidden = down_EIF
    assert activation in GATES
    assert x_TI.shape[1] == num_features
    assert gate_up_EFI == (num_experts, 2 * num_hidden, num_features)
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


def launch_combine(
    pairs_PI: torch.Tensor, weights_TC: torch.Tensor, rows_P: torch.Tensor | None = None
) -> torch.Tensor:
    """The weighted sum of each token's results, `[T, I]`.

    Token `t` has the pairs `t * C` to `t * C + C - 1`; the result of pair `p` is in row `rows_P[p]`
    if given (int64), and in row `p` otherwise.
    """
    (num_tokens, num_chosen), size = weights_TC.shape, pairs_PI.shape[1]
    out_TI = pairs_PI.new_empty(num_tokens, size)
    grid = num_tokens, ceil_div(size, _SUM_BLOCK)
    _combine_kernel[grid](
        pairs_PI,
        weights_TC,
        rows_P,
        out_TI,
        size,
        NUM_CHOSEN=num_chosen,
        B=_SUM_BLOCK,
        num_stages=NUM_STAGES,
    )
    return out_TI


combine = define_operator("combine_experts", launch_combine)


@fake_of(combine)
def _(
    pairs_PI: torch.Tensor, weights_TC: torch.Tensor, rows_P: torch.Tensor | None = None
) -> torch.Tensor:
    return pairs_PI.new_empty(len(weights_TC), pairs_PI.shape[1])


@triton.jit
def _combine_kernel(
    pairs_ptr, weights_ptr, rows_ptr, out_ptr, size, NUM_CHOSEN: tl.constexpr, B: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for slot in range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + slot
        row = pair if rows_ptr is None else tl.load(rows_ptr + pair)
        values = tl.load(pairs_ptr + row * size + features, mask=features < size, other=0)
        total += tl.load(weights_ptr + pair) * values.to(tl.float32)
    out_ptrs = out_ptr + token * size + features
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=features < size)


def variants() -> tuple[Variant, ...]:
    """Both products of 8 experts of a token, in a batch and in a prompt, and the sum."""
    types = {"pairs_ptr": "*bf16", "weights_ptr": "*fp32", "out_ptr": "*bf16"}
    constants = {"NUM_CHOSEN": 8, "B": _SUM_BLOCK}
    combine_variant = partial(product_variant, kernel=_combine_kernel)
    gate_up = partial(grouped_variant, pairs_per_row=8, gate="silu")
    return (
        combine_variant("combine", types=types, constants=constants | {"rows_ptr": None}),
        combine_variant("combine_sorted", types=types | {"rows_ptr": "*i64"}, constants=constants),
        gate_up("gate_up_16", Tiling(16, 64)),
        gate_up("gate_up_128", Tiling(128, 128)),
        grouped_variant("down_16", Tiling(16, 64)),
    )
