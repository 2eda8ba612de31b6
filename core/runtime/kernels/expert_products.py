"""The products of all experts of a layer with the tokens routed to them, on a GPU.

Owns the choice of kernel. Plain weights in bfloat16 are multiplied by torch's library where each
expert has many rows, which then lie in memory expert by expert; everything else is ours. The
library rounds the sums of gate and up before the gate, so the choice depends on the batch, and
deterministic mode always uses our kernels.

Shapes: T tokens, I features, F features inside an expert, E experts, C chosen experts of a token,
P = T * C pairs of a token and an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triptych.core.runtime.kernels.gated import Activation, SwigluClamp, activation_of, gate_of
from triptych.core.runtime.kernels.library_products import cuda_capability
from triptych.core.runtime.kernels.stacked_weights import PLAIN, StackedWeight

MIN_EXPERT_ROWS = 128
"""Rows for each expert, on average, from which the library's product is used.

An estimate: at the rate of our kernel on an H100, reading an expert's weights takes as long as
multiplying about 100 rows; with fewer, memory is what both wait for.
"""
_GROUPING_DEVICES = {(9, 0), (10, 0)}
"""Compute capabilities with a kernel of the library's; elsewhere it waits for the device."""
_ALIGNED = 8
"""Sizes in bfloat16 are multiples of 16 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRule:
    """The rule of an expert: its gate, and the biases `[E, 2 F]` and `[E, I]` of its products.

    Without a gate, the activation alone lies between the products, and `gate_up` has the rows of
    one. A `clamp` is that of SwiGLU. If it `scales_inputs`, the weight of a token multiplies the
    expert's input, not its result; there are no biases then.
    """

    activation: Activation = "silu"
    has_gate: bool = True
    clamp: SwigluClamp | None = None
    gate_up_bias_EF: torch.Tensor | None = None
    down_bias_EI: torch.Tensor | None = None
    scales_inputs: bool = False

    def __post_init__(self) -> None:
        has_biases = self.gate_up_bias_EF is not None or self.down_bias_EI is not None
        assert not (self.scales_inputs and has_biases)

    def activate(self, x_PF: torch.Tensor) -> torch.Tensor:
        """Compute what lies between the products, in torch."""
        if not self.has_gate:
            return activation_of(self.activation)(x_PF)
        return gate_of(self.activation, self.clamp)(x_PF)


def moe_product(
    x_TI: torch.Tensor,
    gate_up: torch.Tensor | StackedWeight,
    down: torch.Tensor | StackedWeight,
    routing: tuple[torch.Tensor, torch.Tensor],
    rule: ExpertRule,
    *,
    is_deterministic: bool,
) -> torch.Tensor:
    """The sum of `weight * down @ (act(gate @ x) * (up @ x))` over a token's experts, `[T, I]`.

    `gate_up`, `[E, 2 F, I]`, holds the rows of the gate, then those of the factor; `down` is
    `[E, I, F]`. `routing` has the weights of each token's experts, float32, and their numbers,
    int32, `[T, C]` both.
    """
    from triptych.core.runtime.kernels.triton.moe import moe_mlp, packed_moe_mlp

    y_TI: torch.Tensor
    if isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        if not is_deterministic and prefers_library(x_TI, down, routing[1]):
            return library_moe(x_TI, gate_up, down, *routing, rule)
        y_TI = moe_mlp(x_TI, gate_up, down, *routing, *_arguments(rule, is_deterministic))
        return y_TI
    stored = [
        each if isinstance(each, StackedWeight) else StackedWeight(PLAIN, (each,))
        for each in (gate_up, down)
    ]
    parts = [part for each in stored for part in (list(each.tensors), each.form)]
    y_TI = packed_moe_mlp(x_TI, *parts, *routing, *_arguments(rule, is_deterministic))
    return y_TI


def _arguments(rule: ExpertRule, is_deterministic: bool) -> tuple[object, ...]:
    """The last arguments of the operators."""
    gate, limits = str(rule.activation), (0.0, 0.0)
    if rule.clamp is not None:
        gate, limits = "clamped_silu", (rule.clamp.alpha, rule.clamp.limit)
    biases = rule.gate_up_bias_EF, rule.down_bias_EI
    return gate, is_deterministic, *limits, *biases, rule.scales_inputs, rule.has_gate


def prefers_library(x_TI: torch.Tensor, down_EIF: torch.Tensor, experts_TC: torch.Tensor) -> bool:
    """Whether `library_moe` is to be used: it can be, and there are rows enough."""
    has_rows = experts_TC.numel() >= MIN_EXPERT_ROWS * len(down_EIF)
    return has_rows and takes_grouped(down_EIF) and x_TI.dtype is down_EIF.dtype


def takes_grouped(down_EIF: torch.Tensor) -> bool:
    """Whether torch's library has the products of such experts, on the weights' device."""
    is_aligned = all(size % _ALIGNED == 0 for size in down_EIF.shape[1:])
    has_kernel = cuda_capability(down_EIF.device) in _GROUPING_DEVICES
    return has_kernel and is_aligned and down_EIF.dtype is torch.bfloat16


def library_moe(
    x_TI: torch.Tensor,
    gate_up_EFI: torch.Tensor,
    down_EIF: torch.Tensor,
    weights_TC: torch.Tensor,
    experts_TC: torch.Tensor,
    rule: ExpertRule,
) -> torch.Tensor:
    """As `moe_product`, by torch's library; of experts that it takes."""
    from triptych.core.runtime.kernels.triton.moe import combine

    num_experts, num_chosen = len(down_EIF), experts_TC.shape[1]
    experts_P, pairs_P = experts_TC.flatten().sort(stable=True)
    numbers_E = torch.arange(num_experts, dtype=experts_P.dtype, device=experts_P.device)
    ends_E = torch.searchsorted(experts_P, numbers_E, right=True, out_int32=True)
    x_PI = x_TI.index_select(0, pairs_P // num_chosen)
    if rule.scales_inputs:
        x_PI = (x_PI * weights_TC.view(-1, 1)[pairs_P]).to(x_TI.dtype)
    hidden_PF = torch._grouped_mm(x_PI, gate_up_EFI.mT, offs=ends_E)
    if rule.gate_up_bias_EF is not None:
        hidden_PF += rule.gate_up_bias_EF[experts_P]
    hidden_PF = rule.activate(hidden_PF)
    out_PI = torch._grouped_mm(hidden_PF, down_EIF.mT, offs=ends_E)
    if rule.down_bias_EI is not None:
        out_PI += rule.down_bias_EI[experts_P]
    rows_P = torch.empty_like(pairs_P)
    rows_P[pairs_P] = torch.arange(len(pairs_P), device=pairs_P.device)
    weights = None if rule.scales_inputs else weights_TC
    y_TI: torch.Tensor = combine(out_PI, weights, num_chosen, rows_P)
    return y_TI
