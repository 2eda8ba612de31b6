"""Additional inputs of each layer of a decoder: an embedding of its own for every token and layer.

Owns the table, the projection of the first layer's input that is added to its rows, and the gate
by which a layer takes its part (Gemma 3n and 4).

Shapes: T tokens, C hidden, L layers, P values of a layer's input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from triptych.core.runtime.kernels.gated import Activation, activation_of
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.norm import Norm, RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputConfig:
    """`size` values for each of `num_layers` layers; the table has `vocab_size` rows.

    Ids beyond the table have those of id 0.
    """

    hidden_size: int
    size: int
    num_layers: int
    vocab_size: int
    norm_eps: float


class LayerInputs:
    """The inputs of all layers: rows of a table, and a projection of the embedded tokens."""

    def __init__(
        self, config: LayerInputConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        width = config.num_layers * config.size
        self.table = Linear(width, config.vocab_size, has_bias=False, dtype=dtype, device=device)
        self.projection = Linear(
            config.hidden_size, width, has_bias=False, dtype=dtype, device=device
        )
        # Of x / sqrt(hidden): the same as that of x with a larger epsilon.
        eps = config.norm_eps * config.hidden_size
        self.norm = RMSNorm(config.size, eps=eps, dtype=dtype, device=device)

    def linears(self) -> Iterator[Linear]:
        """Iterate over the projections; the table is none."""
        yield self.projection

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        self.projection.prepare(native)
        self.norm.prepare()

    def look_up(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """The tokens' rows of the table, `[T, L, P]`, scaled."""
        config = self.config
        is_held = (token_ids_T >= 0) & (token_ids_T < config.vocab_size)
        rows = self.table.rows(torch.where(is_held, token_ids_T, 0))
        scale = torch.tensor(config.size**0.5, dtype=rows.dtype)
        scaled: torch.Tensor = (rows * scale).unflatten(1, (config.num_layers, config.size))
        return scaled

    def __call__(self, x_TC: torch.Tensor, rows_TLP: torch.Tensor) -> torch.Tensor:
        """The layers' inputs, `[T, L, P]`, of embedded tokens and the rows of the table."""
        projected_TLP = self.norm(self.projection(x_TC).view_as(rows_TLP))
        inputs_TLP: torch.Tensor = (projected_TLP + rows_TLP) * 2.0**-0.5
        return inputs_TLP


class InputGate:
    """Adds a layer's input to the residual stream: `norm(project(act(gate(x)) * input))`."""

    def __init__(
        self,
        config: LayerInputConfig,
        activation: Activation,
        norm: Norm,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        sizes = (config.hidden_size, config.size)
        self.gate = Linear(*sizes, has_bias=False, dtype=dtype, device=device)
        self.projection = Linear(*sizes[::-1], has_bias=False, dtype=dtype, device=device)
        self.norm = norm
        self._activate = activation_of(activation)

    def linears(self) -> Iterator[Linear]:
        """Iterate over its projections."""
        yield from (self.gate, self.projection)

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses; the norm is its owner's."""
        self.gate.prepare(native)
        self.projection.prepare(native)

    def __call__(self, x_TC: torch.Tensor, input_TP: torch.Tensor) -> torch.Tensor:
        """Compute the part that is to be added to the residual stream."""
        gated_TP = self._activate(self.gate(x_TC)) * input_TP
        return self.norm(self.projection(gated_TP))
