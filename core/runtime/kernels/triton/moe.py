"""The experts of a layer, each applied to the tokens routed to it.

Owns the order of its products, the weighted sum and the reference. Knows nothing of routing.

Shapes: T tokens, I features, F features inside an expert, E experts, C chosen experts of a token,
P = T * C pairs of a token and an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from triptych.core.runtime.kernels.expert_products import ExpertRule
from triptych.core.runtime.kernels.stacked_weights import PLAIN, StackedWeight
from triptych.core.runtime.kernels.triton.gated import GATES, GPT_OSS_GATE, GateRule
from triptych.core.runtime.kernels.triton.grouped import (
    GroupedPairs,
    group_pairs,
    grouped_linear,
    grouped_variant,
    values_of,
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


@dataclass(frozen=True, slots=True)
class _Experts:
    """The experts of a layer. With `scales_inputs`, weights are of their inputs, not results."""

    gate_up: ExpertWeight
    down: ExpertWeight
    gate: GateRule
    gate_up_bias_EF: torch.Tensor | None
    down_bias_EI: torch.Tensor | None
    scales_inputs: bool

    def check(self, x_TI: torch.Tensor, weights_TC: torch.Tensor, experts_TC: torch.Tensor) -> None:
        """Check shapes, types and places."""
        biases = self.gate_up_bias_EF, self.down_bias_EI
        tensors = [tensor for each in (self.gate_up, self.down) for tensor in _tensors_of(each)]
        assert are_on_one_device(x_TI, weights_TC, experts_TC, *biases, *tensors)
        for each in (self.gate_up, self.down):
            assert isinstance(each, StackedWeight) or each.dtype == x_TI.dtype
        num_experts, num_features, num_hidden = self.down.shape
        assert self.gate.kind in GATES
        assert x_TI.shape[1] == num_features
        num_values = values_of(self.gate) * num_hidden
        assert tuple(self.gate_up.shape) == (num_experts, num_values, num_features)
        for bias_EO, size in zip(biases, (num_values, num_features), strict=True):
            assert bias_EO is None or bias_EO.shape == (num_experts, size)
            assert bias_EO is None or bias_EO.is_contiguous()
        assert weights_TC.shape == experts_TC.shape
        assert weights_TC.is_contiguous()

    def run(
        self,
        x_TI: torch.Tensor,
        weights_TC: torch.Tensor,
        experts_TC: torch.Tensor,
        *,
        is_deterministic: bool,
    ) -> torch.Tensor:
        """The weighted sum of each token's experts."""
        self.check(x_TI, weights_TC, experts_TC)
        num_experts, num_features, num_hidden = self.down.shape
        num_pairs, num_chosen = experts_TC.numel(), experts_TC.shape[1]
        tiling = choose_tiling(
            ceil_div(num_pairs, num_experts), num_hidden, 0, is_deterministic=is_deterministic
        )
        stored = (self.gate_up, self.down)
        forms = (each.form for each in stored if isinstance(each, StackedWeight))
        tiling = fitting_tiling(tiling, *forms)
        pairs = group_pairs(experts_TC.view(-1), num_experts, tiling.rows)
        hidden_PF = x_TI.new_empty(num_pairs, num_hidden)
        first = {"pairs_per_row": num_chosen, "gate": self.gate, "bias_EO": self.gate_up_bias_EF}
        first["scale_P"] = weights_TC.view(-1) if self.scales_inputs else None
        _multiply(x_TI, self.gate_up, pairs, hidden_PF, tiling, **first)
        out_PI = x_TI.new_empty(num_pairs, num_features)
        _multiply(hidden_PF, self.down, pairs, out_PI, tiling, bias_EO=self.down_bias_EI)
        return launch_combine(out_PI, None if self.scales_inputs else weights_TC, num_chosen)


def _tensors_of(weight: ExpertWeight) -> Sequence[torch.Tensor]:
    return weight.tensors if isinstance(weight, StackedWeight) else (weight,)


def _multiply(
    x_RI: torch.Tensor,
    weight: ExpertWeight,
    pairs: GroupedPairs,
    out_PO: torch.Tensor,
    tiling: Tiling,
    **options: Any,
) -> None:
    if isinstance(weight, StackedWeight) and weight.form != PLAIN:
        packed_grouped_linear(x_RI, weight, pairs, out_PO, tiling, **options)
    else:
        (plain_EOI,) = _tensors_of(weight)
        grouped_linear(x_RI, plain_EOI, pairs, out_PO, tiling, **options)


def launch_moe_mlp(
    x_TI: torch.Tensor,
    gate_up_EFI: torch.Tensor,
    down_EIF: torch.Tensor,
    weights_TC: torch.Tensor,
    experts_TC: torch.Tensor,
    gate: str,
    deterministic: bool = False,
    alpha: float = 0.0,
    limit: float = 0.0,
    gate_up_bias_EF: torch.Tensor | None = None,
    down_bias_EI: torch.Tensor | None = None,
    scales_inputs: bool = False,
    has_factor: bool = True,
) -> torch.Tensor:
    """The sum of `weight * down @ (act(gate @ x) * (up @ x))` over a token's experts, `[T, I]`.

    `gate_up_EFI` holds the rows of the gate, then those of the factor: `[E, 2 F, I]`. Biases are
    added to the products. If it `scales_inputs`, the weight is a factor of `x`. `gate`, `alpha`,
    `limit` and `has_factor` are those of `GateRule`; without a factor the rows are of the gate
    alone. Weights are float32, experts int32. Within an expert, results are in the type of `x_TI`.
    """
    experts = _Experts(
        *(gate_up_EFI, down_EIF, GateRule(gate, alpha, limit, has_factor)),
        *(gate_up_bias_EF, down_bias_EI, scales_inputs),
    )
    return experts.run(x_TI, weights_TC, experts_TC, is_deterministic=deterministic)


moe_mlp = define_operator("moe_mlp", launch_moe_mlp)


@fake_of(moe_mlp)
def _(
    x_TI: torch.Tensor,
    gate_up_EFI: torch.Tensor,
    down_EIF: torch.Tensor,
    weights_TC: torch.Tensor,
    experts_TC: torch.Tensor,
    gate: str,
    deterministic: bool = False,
    alpha: float = 0.0,
    limit: float = 0.0,
    gate_up_bias_EF: torch.Tensor | None = None,
    down_bias_EI: torch.Tensor | None = None,
    scales_inputs: bool = False,
    has_factor: bool = True,
) -> torch.Tensor:
    experts = _Experts(
        *(gate_up_EFI, down_EIF, GateRule(gate, alpha, limit, has_factor)),
        *(gate_up_bias_EF, down_bias_EI, scales_inputs),
    )
    experts.check(x_TI, weights_TC, experts_TC)
    return x_TI.new_empty(x_TI.shape)


def launch_packed_moe_mlp(
    x_TI: torch.Tensor,
    gate_up: list[torch.Tensor],
    gate_up_form: str,
    down: list[torch.Tensor],
    down_form: str,
    weights_TC: torch.Tensor,
    experts_TC: torch.Tensor,
    gate: str,
    deterministic: bool = False,
    alpha: float = 0.0,
    limit: float = 0.0,
    gate_up_bias_EF: torch.Tensor | None = None,
    down_bias_EI: torch.Tensor | None = None,
    scales_inputs: bool = False,
    has_factor: bool = True,
) -> torch.Tensor:
    """As `launch_moe_mlp`, of the tensors and forms of two `StackedWeight`."""
    stacked = StackedWeight(gate_up_form, tuple(gate_up)), StackedWeight(down_form, tuple(down))
    experts = _Experts(
        *(*stacked, GateRule(gate, alpha, limit, has_factor)),
        *(gate_up_bias_EF, down_bias_EI, scales_inputs),
    )
    return experts.run(x_TI, weights_TC, experts_TC, is_deterministic=deterministic)


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
    gate: str,
    deterministic: bool = False,
    alpha: float = 0.0,
    limit: float = 0.0,
    gate_up_bias_EF: torch.Tensor | None = None,
    down_bias_EI: torch.Tensor | None = None,
    scales_inputs: bool = False,
    has_factor: bool = True,
) -> torch.Tensor:
    stacked = StackedWeight(gate_up_form, tuple(gate_up)), StackedWeight(down_form, tuple(down))
    experts = _Experts(
        *(*stacked, GateRule(gate, alpha, limit, has_factor)),
        *(gate_up_bias_EF, down_bias_EI, scales_inputs),
    )
    experts.check(x_TI, weights_TC, experts_TC)
    return x_TI.new_empty(x_TI.shape)


def reference(
    x_TI: torch.Tensor,
    gate_up_EFI: torch.Tensor,
    down_EIF: torch.Tensor,
    weights_TC: torch.Tensor,
    experts_TC: torch.Tensor,
    rule: ExpertRule,
) -> torch.Tensor:
    """Compute expert by expert, in float32."""
    out_TI = torch.zeros_like(x_TI, dtype=torch.float32)
    for expert, (gate_up_FI, down_IF) in enumerate(zip(gate_up_EFI, down_EIF, strict=True)):
        tokens, slots = torch.where(experts_TC == expert)
        weights_P1 = weights_TC[tokens, slots].unsqueeze(1)
        x_PI = x_TI[tokens].float() * (weights_P1 if rule.scales_inputs else 1.0)
        hidden_PF = x_PI @ gate_up_FI.float().t()
        if rule.gate_up_bias_EF is not None:
            hidden_PF += rule.gate_up_bias_EF[expert].float()
        out_PI = rule.activate(hidden_PF).to(x_TI.dtype).float() @ down_IF.float().t()
        if rule.down_bias_EI is not None:
            out_PI += rule.down_bias_EI[expert].float()
        out_PI = out_PI.to(x_TI.dtype).float()
        out_TI.index_add_(0, tokens, out_PI * (1.0 if rule.scales_inputs else weights_P1))
    return out_TI.to(x_TI.dtype)


def launch_combine(
    pairs_PI: torch.Tensor,
    weights_TC: torch.Tensor | None,
    num_chosen: int,
    rows_P: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of each token's results, `[T, I]`, weighted if there are weights.

    Token `t` has the pairs `t * C` to `t * C + C - 1`; the result of pair `p` is in row `rows_P[p]`
    if given (int64), and in row `p` otherwise.
    """
    num_tokens, size = len(pairs_PI) // num_chosen, pairs_PI.shape[1]
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
    pairs_PI: torch.Tensor,
    weights_TC: torch.Tensor | None,
    num_chosen: int,
    rows_P: torch.Tensor | None = None,
) -> torch.Tensor:
    return pairs_PI.new_empty(len(pairs_PI) // num_chosen, pairs_PI.shape[1])


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
        if weights_ptr is None:
            total += values.to(tl.float32)
        else:
            total += tl.load(weights_ptr + pair) * values.to(tl.float32)
    out_ptrs = out_ptr + token * size + features
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=features < size)


def variants() -> tuple[Variant, ...]:
    """Both products of 8 experts of a token, in a batch and in a prompt, and the sum.

    Of gpt-oss those with its gate and biases.
    """
    types = {"pairs_ptr": "*bf16", "weights_ptr": "*fp32", "out_ptr": "*bf16"}
    constants = {"NUM_CHOSEN": 8, "B": _SUM_BLOCK}
    unsorted, of_four = {"rows_ptr": None}, {"NUM_CHOSEN": 4}
    combine_variant = partial(product_variant, kernel=_combine_kernel)
    gate_up = partial(grouped_variant, pairs_per_row=8, gate=GateRule("silu"))
    clamped = partial(grouped_variant, pairs_per_row=4, gate=GPT_OSS_GATE, has_bias=True)
    return (
        combine_variant("combine", types=types, constants=constants | unsorted),
        combine_variant("combine_4", types=types, constants=constants | unsorted | of_four),
        combine_variant("combine_sorted", types=types | {"rows_ptr": "*i64"}, constants=constants),
        gate_up("gate_up_16", Tiling(16, 64)),
        gate_up("gate_up_128", Tiling(128, 128)),
        grouped_variant("down_16", Tiling(16, 64)),
        clamped("clamped_16", Tiling(16, 64)),
        clamped("clamped_128", Tiling(128, 128)),
        grouped_variant("biased_down_16", Tiling(16, 64), has_bias=True),
        grouped_variant(
            *("up_16", Tiling(16, 64)), pairs_per_row=8, gate=GateRule("relu2", has_factor=False)
        ),
    )
