"""The experts of another library's mixture, with weights that stay as they are stored.

Owns the replacement of a module of transformers that holds all experts of a layer in a few large
tensors: each expert gets two projections of ours. The class still routes, and its own functions
still gate. Knows no model and no file.

Shapes: T tokens, N tokens of an expert, C hidden, F features, X chosen experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from triptych.core.runtime.kernels.packed_linear import HeldWeight
from triptych.core.runtime.layers.block_layers import BlockDevice
from triptych.core.runtime.layers.chosen_experts import chosen_experts
from triptych.core.runtime.layers.linear import Linear


class HeldExperts(nn.Module):
    """Takes the place of `experts`, whose `gate_up` and `down` weights it holds for each expert.

    Of each expert these are the weights whose rows lie one after the other: gate and up, or up
    alone. `experts` is a module with transformers' interface for experts.
    """

    def __init__(
        self,
        experts: Any,
        gate_up: Sequence[Sequence[HeldWeight]],
        down: Sequence[HeldWeight],
        where: BlockDevice,
    ) -> None:
        super().__init__()
        self._experts = experts
        self._gate_up = [_held(weights, where) for weights in gate_up]
        self._down = [_held([weight], where) for weight in down]

    @property
    def num_bytes(self) -> int:
        """The bytes of the weights."""
        return sum(linear.num_bytes for linear in (*self._gate_up, *self._down))

    def forward(self, x_TC: Tensor, experts_TX: Tensor, weights_TX: Tensor) -> Tensor:
        """Run the experts one after the other, with sums in float32."""
        total_TC = torch.zeros_like(x_TC, dtype=torch.float32)
        num_features = self._down[0].num_inputs
        for number, tokens_N, places_N in chosen_experts(experts_TX, num_features):
            if number < len(self._down):  # a class may mark places without an expert
                y_NC = self._run(number, x_TC[tokens_N])
                total_TC[tokens_N] += y_NC * weights_TX[tokens_N, places_N, None]
        return total_TC.to(x_TC.dtype)

    def _run(self, number: int, x_NC: Tensor) -> Tensor:
        """One expert, in float32."""
        experts = self._experts
        inner_NF = self._gate_up[number](x_NC.contiguous())
        if experts.has_gate and not experts.is_concatenated:
            inner_NF = inner_NF.unflatten(-1, (2, -1)).mT.flatten(-2)  # gate and up alternate
        if experts.has_bias:
            inner_NF = inner_NF + experts.gate_up_proj_bias[number]
        gate = experts._apply_gate if experts.has_gate else experts.act_fn
        y_NC = self._down[number](gate(inner_NF).contiguous(), out_dtype=torch.float32)
        if experts.has_bias:
            y_NC = y_NC + experts.down_proj_bias[number]
        if experts.has_post_expert_norm:
            y_NC = experts.post_expert_norm(y_NC.to(x_NC.dtype)).float()
        return y_NC


def _held(weights: Sequence[HeldWeight], where: BlockDevice) -> Linear:
    num_outputs = sum(weight.shape[0] for weight in weights)
    linear = Linear(
        weights[0].shape[1], num_outputs, has_bias=False, dtype=where.dtype, device=where.device
    )
    first = 0
    for weight in weights:
        linear.hold(first, weight)
        first += weight.shape[0]
    linear.prepare(where.native)
    return linear
