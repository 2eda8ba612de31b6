"""A mixture of experts in the place of an MLP: each token goes through a few of many.

Owns the router and the experts' projections. On a GPU all experts are one product over tokens
sorted by expert; elsewhere each expert has two projections. Weights may stay as they are stored.
`native_mixture` runs a whole mixture in one call of the CPU kernels. Knows nothing of checkpoints.

Mixture of experts: Shazeer et al. 2017, arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088.
Shared experts: Dai et al. 2024, arXiv:2401.06066.

Shapes: T tokens, C hidden, E experts, F features of an expert, X chosen experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from triptych.core.runtime.kernels.expert_products import ExpertRule, moe_product
from triptych.core.runtime.kernels.gated import Activation, SwigluClamp, activation_of, gate_of
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.routing import Routing, route
from triptych.core.runtime.layers.chosen_experts import chosen_experts
from triptych.core.runtime.layers.expert_weights import ExpertWeights
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.native_mixture import NativeMixture, can_fuse_mixture
from triptych.core.runtime.layers.shards import Shard

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The experts of every layer except `dense_layers`, and how they are chosen.

    Every token also goes through a shared expert of `shared_size` features, if any; with a
    `has_shared_gate` its result is multiplied by the sigmoid of one more projection.
    `has_correction`: see `core.runtime.kernels.routing`. Experts have a gate, or only an
    activation between their two projections. If it `scales_inputs`, weights are of an
    expert's input, not of its result. A `clamp` limits the experts' gates. Checkpoints name tensors
    as `naming` says (see `core.runtime.decoders.expert_names`). In a model that is divided over
    ranks, a rank has the experts `experts`, or `features` of each, and `shared_features` of the
    shared one.
    """

    num_experts: int
    routing: Routing
    intermediate_size: int
    shared_size: int = 0
    has_shared_gate: bool = False
    has_router_bias: bool = False
    has_correction: bool = False
    has_expert_bias: bool = False
    has_gate: bool = True
    scales_inputs: bool = False
    clamp: SwigluClamp | None = None
    naming: str = ""
    dense_layers: frozenset[int] = frozenset()
    experts: Shard | None = None
    features: Shard | None = None
    shared_features: Shard | None = None


@dataclass(frozen=True, slots=True)
class Expert:
    """One MLP: gate and up, or up alone, as one projection, and down."""

    gate_up: Linear
    down: Linear


def has_grouped_products(device: torch.device) -> bool:
    """Whether all experts are one product on this device."""
    return device.type == "cuda"


class MoeMlp:
    """The sum of `weight * expert(x)` over a token's experts, and of the shared expert.

    With a `group` each rank sums its part, and the sums are added over the ranks.
    """

    def __init__(
        self,
        config: MoeConfig,
        hidden_size: int,
        activation: Activation,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
    ) -> None:
        self.shard = config.experts or Shard.whole(config.num_experts)
        self.features = config.features or Shard.whole(config.intermediate_size)
        self.shared_features = config.shared_features or Shard.whole(config.shared_size)
        self.config, self.activation = config, activation
        self._hidden_size, self._group = hidden_size, group
        self.fused: NativeMixture | None = None
        self._new = new = partial(Linear, dtype=dtype, device=device)
        self.router = new(hidden_size, config.num_experts, has_bias=config.has_router_bias)
        self.correction_E: torch.Tensor | None = None
        if config.has_correction:
            self.correction_E = torch.empty(config.num_experts, device=device)
        self._all: tuple[ExpertWeights, ExpertWeights] | None = None
        if has_grouped_products(device):
            self._all = self._new_stacks(dtype, device)
            pairs = zip(*(stack.linears for stack in self._all), strict=True)
            self.experts = [Expert(*pair) for pair in pairs]
        else:
            features, has_bias = self.features.length, config.has_expert_bias
            self.experts = [self._expert(features, has_bias) for _ in range(self.shard.length)]
        num_shared = self.shared_features.length
        self.shared = self._expert(num_shared, has_bias=False) if config.shared_size else None
        self.shared_gate = new(hidden_size, 1, has_bias=False) if config.has_shared_gate else None

    def _expert(self, num_features: int, has_bias: bool) -> Expert:
        num_outputs = (1 + self.config.has_gate) * num_features
        sizes = (self._hidden_size, num_outputs), (num_features, self._hidden_size)
        return Expert(*(self._new(*each, has_bias=has_bias) for each in sizes))

    def _new_stacks(
        self, dtype: torch.dtype, device: torch.device
    ) -> tuple[ExpertWeights, ExpertWeights]:
        features, hidden = self.features.length, self._hidden_size
        new = partial(
            ExpertWeights, has_bias=self.config.has_expert_bias, dtype=dtype, device=device
        )
        num_experts, num_outputs = self.shard.length, (1 + self.config.has_gate) * features
        return new(num_experts, hidden, num_outputs), new(num_experts, features, hidden)

    def linears(self) -> Iterator[Linear]:
        """Iterate over its projections."""
        yield self.router
        if self.shared_gate is not None:
            yield self.shared_gate
        for expert in (*self.experts, *((self.shared,) if self.shared else ())):
            yield from (expert.gate_up, expert.down)

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        is_added_elsewhere = self._group is not None and self._group.rank > 0
        for expert in self.experts if self.features.length < self.features.total else ():
            if expert.down.bias_O is not None and is_added_elsewhere:
                expert.down.bias_O.zero_()
        for linear in self.linears():
            linear.prepare(native)
        if native is not None and can_fuse_mixture(self):
            self.fused = NativeMixture(self, native)

    def __call__(self, x_TC: torch.Tensor, residual_TC: torch.Tensor | None) -> torch.Tensor:
        """Apply the experts. Adds to the residual where given."""
        if self.fused is not None:
            return self.fused(x_TC, residual_TC)
        logits_TE = self.router(x_TC, out_dtype=torch.float32)
        weights_TX, experts_TX = route(logits_TE, self.config.routing, self.correction_E)
        run = self._one_by_one if self._all is None else self._together
        y_TC = run(x_TC, weights_TX, experts_TX)
        if self.shared is not None:
            y_TC = y_TC + self._of_shared(x_TC, self.shared)
        if self._group is not None:
            y_TC = self._group.sum(y_TC)
        y_TC = y_TC.to(x_TC.dtype)
        return y_TC if residual_TC is None else residual_TC + y_TC

    def _of_shared(self, x_TC: torch.Tensor, shared: Expert) -> torch.Tensor:
        hidden_TF = self._activate(shared.gate_up(x_TC))
        y_TC = shared.down(hidden_TF, out_dtype=torch.float32)
        if self.shared_gate is not None:
            y_TC *= self.shared_gate(x_TC, out_dtype=torch.float32).sigmoid()
        return y_TC

    def _together(
        self, x_TC: torch.Tensor, weights_TX: torch.Tensor, experts_TX: torch.Tensor
    ) -> torch.Tensor:
        assert self._all is not None
        if self.shard.length < self.shard.total:  # experts of other ranks get weight 0
            local_TX = experts_TX - self.shard.first
            is_here = (local_TX >= 0) & (local_TX < self.shard.length)
            weights_TX = weights_TX * is_here
            experts_TX = local_TX % self.shard.length
        gate_up, down = self._all
        rule = ExpertRule(
            activation=self.activation,
            has_gate=self.config.has_gate,
            clamp=self.config.clamp,
            gate_up_bias_EF=gate_up.bias_EO,
            down_bias_EI=down.bias_EO,
            scales_inputs=self.config.scales_inputs,
        )
        return moe_product(
            x_TC,
            gate_up.value,
            down.value,
            (weights_TX, experts_TX),
            rule,
            is_deterministic=self.router.is_deterministic,
        )

    def _one_by_one(
        self, x_TC: torch.Tensor, weights_TX: torch.Tensor, experts_TX: torch.Tensor
    ) -> torch.Tensor:
        """Run the experts one after the other, with sums in float32."""
        total_TC = torch.zeros_like(x_TC, dtype=torch.float32)
        num_features = self.config.intermediate_size
        for number, tokens_N, places_N in chosen_experts(experts_TX, num_features):
            if number in self.shard:
                expert = self.experts[number - self.shard.first]
                weights_N1 = weights_TX[tokens_N, places_N, None]
                total_TC[tokens_N] += self._of_expert(x_TC[tokens_N], weights_N1, expert)
        return total_TC

    def _activate(self, x: torch.Tensor, clamp: SwigluClamp | None = None) -> torch.Tensor:
        own = self.activation
        return (gate_of(own, clamp) if self.config.has_gate else activation_of(own))(x)

    def _of_expert(
        self, x_NC: torch.Tensor, weights_N1: torch.Tensor, expert: Expert
    ) -> torch.Tensor:
        if self.config.scales_inputs:
            x_NC = (x_NC * weights_N1).to(x_NC.dtype)
        hidden_NF = self._activate(expert.gate_up(x_NC), self.config.clamp)
        y_NC = expert.down(hidden_NF, out_dtype=torch.float32)
        return y_NC if self.config.scales_inputs else y_NC * weights_N1
