"""Recurrent layers whose state has a matrix for each head, which decays from token to token.

Owns what such layers have in common: their states, and their decays. Knows no rule of update.

Shapes: H heads, X steps of all heads.
"""

from __future__ import annotations

import torch

from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.recurrent import (
    RecurrentConfig,
    RecurrentLayer,
    convolution_state,
)
from triptych.core.runtime.layers.states import LayerState, StateShape


def matrix_state(config: RecurrentConfig, matrix: tuple[int, int, int]) -> LayerState:
    """The tensors that a row keeps, the last inputs of the convolution among them."""
    return convolution_state(config), StateShape(matrix, torch.float32)


def matrix_position_values(config: RecurrentConfig) -> int:
    """The most values of a position that a layer holds, apart from the residual stream."""
    return 2 * config.num_inputs + 4 * config.num_outputs


class MatrixLayer(RecurrentLayer):
    """A layer of `num_heads` heads, each with a decay, and `num_steps` steps, each with a bias."""

    def __init__(
        self,
        config: RecurrentConfig,
        num_heads: int,
        num_steps: int,
        *,
        cells: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config, cells=cells, dtype=dtype, device=device)
        self.decay_log_H, self.dt_bias_X = (
            torch.empty(size, dtype=torch.float32, device=device) for size in (num_heads, num_steps)
        )
        self._decay_H = self.decay_log_H

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        super().prepare(native)
        self._decay_H = -self.decay_log_H.exp()
