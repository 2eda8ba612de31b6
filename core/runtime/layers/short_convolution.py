"""Short convolutions in the place of attention: the recurrent layers of LFM2.

Shapes: T tokens, C hidden, X channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from triptych.core.runtime.kernels.recurrent import StateRows, convolve
from triptych.core.runtime.layers.recurrent import RecurrentLayer, convolution_state
from triptych.core.runtime.layers.states import LayerState


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """One layer: a convolution over `width` tokens of as many channels as the hidden size."""

    hidden_size: int
    width: int
    has_bias: bool = False
    activates: ClassVar[bool] = False
    reads_layer: ClassVar[int | None] = None

    @property
    def has_out_bias(self) -> bool:
        """Whether the last projection has a bias."""
        return self.has_bias

    @property
    def has_convolution_bias(self) -> bool:
        """Whether the convolution has one."""
        return self.has_bias

    @property
    def num_channels(self) -> int:
        """The channels of the convolution."""
        return self.hidden_size

    @property
    def num_inputs(self) -> int:
        """A factor before the convolution, one after it, and its inputs."""
        return 3 * self.hidden_size

    @property
    def num_outputs(self) -> int:
        """The values of a token's result."""
        return self.hidden_size

    @property
    def state(self) -> LayerState:
        """The tensor that a row keeps."""
        return (convolution_state(self),)

    @property
    def position_values(self) -> int:
        """The most values of a position that the layer holds, apart from the residual stream."""
        return 6 * self.hidden_size


class ShortConvolution(RecurrentLayer):
    """`out(c * convolution(b * x))`, all three from one projection."""

    kind = 0

    def mix(
        self, x_TC: torch.Tensor, states: Sequence[torch.Tensor], rows: StateRows
    ) -> torch.Tensor:
        """Compute what the last projection reads, `out_TX`."""
        before_TX, after_TX, x_TX = self.inputs(x_TC).chunk(3, dim=1)
        return after_TX * convolve(before_TX * x_TX, self.convolution, states[0], rows)
