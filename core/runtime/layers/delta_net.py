"""Linear attention by the gated delta rule: Qwen3-Next, Qwen3.5, OLMo hybrid and Kimi Linear.

Owns the weights of one layer. A row's state has a matrix for each value head, and the last inputs
of the convolution of queries, keys and values.

Shapes: T tokens, C hidden, I inputs, O outputs, G key heads, H value heads, D key dim, E value dim,
A decays of a head, X values of several heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from triptych.core.runtime.kernels.native.state_arguments import (
    MAX_HEAD,
    DeltaRuleArguments,
    RecurrentArguments,
)
from triptych.core.runtime.kernels.recurrent import (
    DeltaInputs,
    GatedNorm,
    GateKind,
    StateRows,
    convolve,
    gated_delta_rule,
    gated_norm,
)
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.matrix_states import (
    MatrixLayer,
    matrix_position_values,
    matrix_state,
)
from triptych.core.runtime.layers.states import LayerState


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """One layer. A key head serves several value heads. `norm_eps` is that of a head's result.

    A head has one decay, or one for each value of its key. The decays and gates of all heads are
    made by the first projection, or each by one of its own from `low_rank` values. What a token
    changes in the state is multiplied by `beta_scale`.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int
    norm_eps: float
    has_key_decays: bool = False
    low_rank: int = 0
    gate: GateKind = "silu"
    beta_scale: float = 1.0
    activates: ClassVar[bool] = True
    has_bias: ClassVar[bool] = False
    has_convolution_bias: ClassVar[bool] = False
    has_out_bias: ClassVar[bool] = False
    reads_layer: ClassVar[int | None] = None

    @property
    def num_keys(self) -> int:
        """The values of all keys of a token, and of all queries."""
        return self.num_key_heads * self.key_dim

    @property
    def num_outputs(self) -> int:
        """The values of a token's result."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """The values of queries, keys and values, all of which pass through the convolution."""
        return 2 * self.num_keys + self.num_outputs

    @property
    def num_head_decays(self) -> int:
        """The decays of a head."""
        return self.key_dim if self.has_key_decays else 1

    @property
    def num_decays(self) -> int:
        """The decays of all heads."""
        return self.num_value_heads * self.num_head_decays

    @property
    def num_inputs(self) -> int:
        """The channels, a number for each head, low values, decays, and the gate of the result."""
        ungated = self.num_channels + self.num_value_heads + 2 * self.low_rank
        return ungated + self.num_decays + self.num_outputs

    @property
    def state(self) -> LayerState:
        """The tensors that a row keeps."""
        return matrix_state(self, (self.num_value_heads, self.key_dim, self.value_dim))

    @property
    def position_values(self) -> int:
        """The most values of a position that the layer holds, apart from the residual stream."""
        return matrix_position_values(self)


class GatedDeltaNet(MatrixLayer):
    """Projection, convolution, gated delta rule, gated norm of each head, projection.

    `decays` and `gates` are projections of low values, if there are any.
    """

    kind = 1

    def __init__(
        self, config: DeltaNetConfig, *, cells: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        sizes = config.num_value_heads, config.num_decays
        super().__init__(config, *sizes, cells=cells, dtype=dtype, device=device)
        self.norm_E = torch.empty(config.value_dim, dtype=torch.float32, device=device)
        self.decays: Linear | None = None
        self.gates: Linear | None = None
        if config.low_rank:
            new = partial(Linear, config.low_rank, has_bias=False, dtype=dtype, device=device)
            self.decays, self.gates = new(config.num_decays), new(config.num_outputs)

    @property
    def num_projected(self) -> int:
        """The inputs that `into` makes: not those that are made from low values."""
        config: DeltaNetConfig = self.config
        is_made_later = config.low_rank > 0
        return config.num_inputs - is_made_later * (config.num_decays + config.num_outputs)

    def linears(self) -> Iterator[Linear]:
        """Iterate over its projections."""
        later = (each for each in (self.decays, self.gates) if each is not None)
        yield from (*super().linears(), *later)

    def inputs(self, x_TC: torch.Tensor) -> torch.Tensor:
        """The inputs of the recurrent part, `in_TI`."""
        into_TX, *made = self._project(x_TC)
        return torch.cat((into_TX, *made), dim=1) if made else into_TX

    def _project(self, x_TC: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The inputs that `into` makes; decays and gates, if they are made from low values."""
        into_TX = self.into(x_TC)
        if self.decays is None or self.gates is None:
            return (into_TX,)
        low_TX = into_TX[:, -2 * self.config.low_rank :]
        of_decays_TX, of_gates_TX = (part.contiguous() for part in low_TX.chunk(2, dim=1))
        return into_TX, self.decays(of_decays_TX), self.gates(of_gates_TX)

    def mix(
        self, x_TC: torch.Tensor, states: Sequence[torch.Tensor], rows: StateRows
    ) -> torch.Tensor:
        """Compute what the last projection reads, `out_TO`."""
        config: DeltaNetConfig = self.config
        heads = config.num_value_heads, config.value_dim
        into_TX, *made = self._project(x_TC)
        rest = (2 * config.low_rank,) if made else (config.num_decays, config.num_outputs)
        sizes = config.num_channels, config.num_value_heads, *rest
        qkv_TX, b_TH, *after = into_TX.split(sizes, dim=1)
        a_TX, z_TO = made or after
        qkv_TX = convolve(qkv_TX, self.convolution, states[0], rows)
        q_TX, k_TX, v_TX = qkv_TX.split((config.num_keys,) * 2 + (config.num_outputs,), dim=1)
        q_TGD, k_TGD = (x.unflatten(1, (config.num_key_heads, -1)) for x in (q_TX, k_TX))
        inputs = DeltaInputs(
            *(q_TGD, k_TGD, v_TX.unflatten(1, heads)),
            a_THA=a_TX.unflatten(1, (config.num_value_heads, -1)),
            b_TH=b_TH,
            decay_H=self._decay_H,
            dt_bias_HA=self.dt_bias_X.view(config.num_value_heads, -1),
            beta_scale=config.beta_scale,
        )
        y_THE = gated_delta_rule(inputs, states[1], rows)
        norm = GatedNorm(
            weight=self.norm_E,
            size=config.value_dim,
            eps=config.norm_eps,
            place="first",
            gate=config.gate,
        )
        return gated_norm(y_THE.flatten(1), z_TO, norm)

    def arguments(self, states: Sequence[torch.Tensor]) -> RecurrentArguments:
        """The structure of the recurrent part, with its states."""
        config: DeltaNetConfig = self.config
        arguments = super().arguments(states)
        assert max(config.key_dim, config.value_dim) <= MAX_HEAD, "configurations check it"
        arguments.delta = DeltaRuleArguments(
            *(each.data_ptr() for each in (self._decay_H, self.dt_bias_X, self.norm_E, states[1])),
            *(config.num_key_heads, config.num_value_heads, config.key_dim, config.value_dim),
            *(config.num_head_decays, config.low_rank, config.gate == "sigmoid"),
            *(config.norm_eps, config.beta_scale),
        )
        return arguments
