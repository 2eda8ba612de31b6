"""Linear attention by the gated delta rule: the recurrent layers of Qwen3-Next and Qwen3.5.

Owns the weights of one layer. A row's state has a matrix for each value head, and the last inputs
of the convolution of queries, keys and values.

Shapes: T tokens, I inputs, O outputs, G key heads, H value heads, D key dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    StateRows,
    convolve,
    gated_delta_rule,
    gated_norm,
)
from triptych.core.runtime.layers.matrix_states import (
    MatrixLayer,
    matrix_position_values,
    matrix_state,
)
from triptych.core.runtime.layers.states import LayerState


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """One layer. A key head serves several value heads. `norm_eps` is that of a head's result."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int
    norm_eps: float
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
    def num_inputs(self) -> int:
        """The channels, the gate of the result, and two numbers for each head."""
        return self.num_channels + self.num_outputs + 2 * self.num_value_heads

    @property
    def state(self) -> LayerState:
        """The tensors that a row keeps."""
        return matrix_state(self, (self.num_value_heads, self.key_dim, self.value_dim))

    @property
    def position_values(self) -> int:
        """The most values of a position that the layer holds, apart from the residual stream."""
        return matrix_position_values(self)


class GatedDeltaNet(MatrixLayer):
    """Projection, convolution, gated delta rule, gated norm of each head, projection."""

    kind = 1

    def __init__(
        self, config: DeltaNetConfig, *, cells: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        num_heads = config.num_value_heads
        super().__init__(config, num_heads, cells=cells, dtype=dtype, device=device)
        self.norm_E = torch.empty(config.value_dim, dtype=torch.float32, device=device)

    def mix(
        self, in_TI: torch.Tensor, states: Sequence[torch.Tensor], rows: StateRows
    ) -> torch.Tensor:
        """Compute what lies between the projections, `out_TO`."""
        config: DeltaNetConfig = self.config
        heads = config.num_value_heads, config.value_dim
        sizes = config.num_channels, config.num_outputs, *(config.num_value_heads,) * 2
        qkv_TX, z_TO, b_TH, a_TH = in_TI.split(sizes, dim=1)
        qkv_TX = convolve(qkv_TX, self.convolution, states[0], rows)
        q_TX, k_TX, v_TX = qkv_TX.split((config.num_keys,) * 2 + (config.num_outputs,), dim=1)
        q_TGD, k_TGD = (x.unflatten(1, (config.num_key_heads, -1)) for x in (q_TX, k_TX))
        inputs = DeltaInputs(
            *(q_TGD, k_TGD, v_TX.unflatten(1, heads), a_TH, b_TH),
            decay_H=self._decay_H,
            dt_bias_H=self.dt_bias_H,
        )
        y_THE = gated_delta_rule(inputs, states[1], rows)
        norm = GatedNorm(
            weight=self.norm_E, size=config.value_dim, eps=config.norm_eps, place="first"
        )
        return gated_norm(y_THE.flatten(1), z_TO, norm)

    def arguments(self, states: Sequence[torch.Tensor]) -> RecurrentArguments:
        """The structure of the recurrent part, with its states."""
        config: DeltaNetConfig = self.config
        arguments = super().arguments(states)
        assert max(config.key_dim, config.value_dim) <= MAX_HEAD, "configurations check it"
        arguments.delta = DeltaRuleArguments(
            *(each.data_ptr() for each in (self._decay_H, self.dt_bias_H, self.norm_E, states[1])),
            *(config.num_key_heads, config.num_value_heads, config.key_dim, config.value_dim),
            config.norm_eps,
        )
        return arguments
