"""A mixture of experts in the place of an MLP: each token goes through a few of many.

Owns the router and the experts' projections. On a GPU all experts are one product over tokens
sorted by expert; elsewhere each expert has two projections. Weights may stay as they are stored.
Knows nothing of checkpoints.

Mixture of experts: Shazeer et al. 2017, arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088.

Shapes: T tokens, C hidden, E experts, F features of an expert, X chosen experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from triptych.core.runtime.kernels.expert_products import moe_product
from triptych.core.runtime.kernels.gated import gelu_and_mul, silu_and_mul
from triptych.core.runtime.kernels.routing import route
from triptych.core.runtime.layers.expert_weights import ExpertWeights
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.shards import Shard

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup

_WHOLE_VALUES = 2**15
"""Up to this number of values torch computes on one thread, row by row; beyond it a row may be
split anywhere, and its last bits depend on where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The number of experts, and how they are chosen. All layers except `dense_layers` have them.

    With `renormalizes` the weights of a token's experts add up to one. Checkpoints name their
    tensors as Mixtral does, or as most others do. In a model that is divided over ranks, a rank has
    the experts `experts`, or `features` of each.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    renormalizes: bool = True
    has_mixtral_names: bool = False
    dense_layers: frozenset[int] = frozenset()
    experts: Shard | None = None
    features: Shard | None = None


@dataclass(frozen=True, slots=True)
class Expert:
    """One MLP: gate and up as one projection, and down."""

    gate_up: Linear
    down: Linear


def has_grouped_products(device: torch.device) -> bool:
    """Whether all experts are one product on this device."""
    return device.type == "cuda"


class MoeMlp:
    """The sum of `weight * expert(x)` over a token's experts.

    With a `group` each rank sums its part, and the sums are added over the ranks.
    """

    def __init__(
        self,
        config: MoeConfig,
        hidden_size: int,
        activation: Literal["silu", "gelu_tanh"],
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
    ) -> None:
        self.shard = config.experts or Shard.whole(config.num_experts)
        self.features = config.features or Shard.whole(config.intermediate_size)
        num_experts, features = self.shard.length, self.features.length
        self.config = config
        self._group = group
        self.router = Linear(
            hidden_size, config.num_experts, has_bias=False, dtype=dtype, device=device
        )
        self._activation = activation
        self._gate = silu_and_mul if activation == "silu" else gelu_and_mul
        self._all: tuple[ExpertWeights, ExpertWeights] | None = None
        sizes = ((hidden_size, 2 * features), (features, hidden_size))
        if has_grouped_products(device):
            self._all = gate_up, down = (
                ExpertWeights(num_experts, *sizes[0], dtype=dtype, device=device),
                ExpertWeights(num_experts, *sizes[1], dtype=dtype, device=device),
            )
            pairs = zip(gate_up.linears, down.linears, strict=True)
            self.experts = [Expert(*pair) for pair in pairs]
        else:
            self.experts = [
                Expert(*(Linear(*s, has_bias=False, dtype=dtype, device=device) for s in sizes))
                for _ in range(num_experts)
            ]

    def linears(self) -> Iterator[Linear]:
        """Iterate over its projections."""
        yield self.router
        for expert in self.experts:
            yield from (expert.gate_up, expert.down)

    def __call__(self, x_TC: torch.Tensor, residual_TC: torch.Tensor | None) -> torch.Tensor:
        """Apply the experts. Adds to the residual where given."""
        weights_TX, experts_TX = route(
            self.router(x_TC, out_dtype=torch.float32),
            self.config.num_chosen,
            renormalize=self.config.renormalizes,
        )
        run = self._one_by_one if self._all is None else self._together
        y_TC = run(x_TC, weights_TX, experts_TX)
        if self._group is not None:
            y_TC = self._group.sum(y_TC)
        y_TC = y_TC.to(x_TC.dtype)
        return y_TC if residual_TC is None else residual_TC + y_TC

    def _together(
        self, x_TC: torch.Tensor, weights_TX: torch.Tensor, experts_TX: torch.Tensor
    ) -> torch.Tensor:
        assert self._all is not None
        if self.shard.length < self.shard.total:  # experts of other ranks get weight 0
            local_TX = experts_TX - self.shard.first
            is_here = (local_TX >= 0) & (local_TX < self.shard.length)
            weights_TX = weights_TX * is_here
            experts_TX = local_TX % self.shard.length
        gate_up, down = (each.value for each in self._all)
        return moe_product(
            x_TC,
            gate_up,
            down,
            (weights_TX, experts_TX),
            self._activation,
            is_deterministic=self.router.is_deterministic,
        )

    def _one_by_one(
        self, x_TC: torch.Tensor, weights_TX: torch.Tensor, experts_TX: torch.Tensor
    ) -> torch.Tensor:
        """Run the experts in the order of their numbers, with sums in float32.

        A token's sum therefore does not depend on other tokens.
        """
        total_TC = torch.zeros_like(x_TC, dtype=torch.float32)
        rows = max(1, _WHOLE_VALUES // self.config.intermediate_size)
        for number in experts_TX.unique().tolist():
            if number not in self.shard:
                continue
            expert = self.experts[number - self.shard.first]
            tokens, places = torch.where(experts_TX == number)
            for tokens_N, places_N in zip(tokens.split(rows), places.split(rows), strict=True):
                hidden_NF = self._gate(expert.gate_up(x_TC[tokens_N]))
                y_NC = expert.down(hidden_NF, out_dtype=torch.float32)
                total_TC[tokens_N] += y_NC * weights_TX[tokens_N, places_N, None]
        return total_TC
