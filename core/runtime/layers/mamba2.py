"""Mamba 2's layers: the recurrent layers of Granite 4, Nemotron-H, Falcon-H1 and others.

Owns the weights of one layer. A row's state has a matrix for each head, and the last inputs of the
convolution.

Shapes: T tokens, C hidden, O outputs, H heads, P values of a head, G groups, N numbers of a state
for each value, X channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.native.state_arguments import (
    MAX_HEAD,
    RecurrentArguments,
    ScanArguments,
)
from triptych.core.runtime.kernels.recurrent import (
    GatedNorm,
    ScanInputs,
    StateRows,
    convolve,
    gated_norm,
    selective_scan,
)
from triptych.core.runtime.layers.matrix_states import (
    MatrixLayer,
    matrix_position_values,
    matrix_state,
)
from triptych.core.runtime.layers.states import LayerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """One layer. Heads of a group share the vectors that write to the state and read from it.

    `input_scales` are factors of the gate, the values, the two vectors and the steps, `out_scale`
    is one of the result. Results may have no norm.
    """

    hidden_size: int
    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    width: int
    norm_eps: float
    step_limits: tuple[float, float] = (0.0, float("inf"))
    has_bias: bool = False
    has_convolution_bias: bool = True
    has_norm: bool = True
    input_scales: tuple[float, float, float, float, float] = (1.0,) * 5
    out_scale: float = 1.0
    activates: ClassVar[bool] = True
    reads_layer: ClassVar[int | None] = None

    @property
    def has_out_bias(self) -> bool:
        """Whether the last projection has a bias."""
        return self.has_bias

    @property
    def num_outputs(self) -> int:
        """The values of a token's result."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """The values, and the two vectors of each group, which pass through the convolution."""
        return self.num_outputs + 2 * self.num_groups * self.state_dim

    @property
    def num_inputs(self) -> int:
        """The gate of the result, the channels, and a number for each head."""
        return self.num_outputs + self.num_channels + self.num_heads

    @property
    def state(self) -> LayerState:
        """The tensors that a row keeps."""
        return matrix_state(self, (self.num_heads, self.head_dim, self.state_dim))

    @property
    def position_values(self) -> int:
        """The most values of a position that the layer holds, apart from the residual stream."""
        return matrix_position_values(self)


class Mamba2(MatrixLayer):
    """Projection, convolution, scan, gate and norm of each group, projection."""

    kind = 2

    def __init__(
        self, config: Mamba2Config, *, cells: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        num_heads = config.num_heads
        super().__init__(config, num_heads, num_heads, cells=cells, dtype=dtype, device=device)
        self.skip_H, self.norm_O = (
            torch.empty(size, dtype=torch.float32, device=device)
            for size in (num_heads, config.num_outputs * config.has_norm)
        )
        self._weight_O = self.norm_O

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        config: Mamba2Config = self.config
        _, values, write, read, _ = config.input_scales
        vectors = config.num_groups * config.state_dim
        parts = self.convolution_X1K.split((config.num_outputs, vectors, vectors))
        for part_X1K, scale in zip(parts, (values, write, read), strict=True):
            part_X1K.mul_(scale)
        super().prepare(native)
        ones_O = self.skip_H.new_ones(config.num_outputs)
        self._weight_O = (self.norm_O if config.has_norm else ones_O) * config.out_scale

    def mix(
        self, x_TC: torch.Tensor, states: Sequence[torch.Tensor], rows: StateRows
    ) -> torch.Tensor:
        """Compute what the last projection reads, `out_TO`."""
        config: Mamba2Config = self.config
        sizes = config.num_outputs, config.num_channels, config.num_heads
        z_TO, x_TX, dt_TH = self.inputs(x_TC).split(sizes, dim=1)
        gate_scale, *_, step_scale = config.input_scales
        x_TX = convolve(x_TX, self.convolution, states[0], rows)
        vectors, groups = config.num_groups * config.state_dim, (config.num_groups, -1)
        x_TO, b_TX, c_TX = x_TX.split((config.num_outputs, vectors, vectors), dim=1)
        inputs = ScanInputs(
            x_THP=x_TO.unflatten(1, (config.num_heads, -1)),
            b_TGN=b_TX.unflatten(1, groups),
            c_TGN=c_TX.unflatten(1, groups),
            dt_TH=dt_TH if step_scale == 1.0 else dt_TH.float() * step_scale,
            decay_H=self._decay_H,
            dt_bias_H=self.dt_bias_X,
            skip_H=self.skip_H,
            limits=config.step_limits,
        )
        is_deterministic = self.into.is_deterministic
        y_THP = selective_scan(inputs, states[1], rows, is_deterministic=is_deterministic)
        norm = GatedNorm(
            weight=self._weight_O,
            size=config.num_outputs // config.num_groups,
            eps=config.norm_eps,
            place="last" if config.has_norm else "none",
            gate_scale=gate_scale,
        )
        return gated_norm(y_THP.flatten(1), z_TO, norm)

    def arguments(self, states: Sequence[torch.Tensor]) -> RecurrentArguments:
        """The structure of the recurrent part, with its states."""
        config: Mamba2Config = self.config
        arguments = super().arguments(states)
        assert config.state_dim <= MAX_HEAD, "configurations check it"
        tensors = (self._decay_H, self.dt_bias_X, self.skip_H, self._weight_O, states[1])
        arguments.scan = ScanArguments(
            *(tensor.data_ptr() for tensor in tensors),
            *(config.num_heads, config.num_groups, config.head_dim, config.state_dim),
            *(config.norm_eps, *config.step_limits),
            *(config.input_scales[0], config.input_scales[-1], config.has_norm),
        )
        return arguments
