"""One layer of a decoder with several residual streams.

Owns the order of its parts (Gemma 3n): it predicts all streams, computes the first, corrects all,
and adds its own input to the others.

Shapes: T tokens, C hidden, N streams, P values of a layer's input.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.altup import AltUp
from triptych.core.runtime.layers.attention import PagedStep, StepPositions
from triptych.core.runtime.layers.decoder_layer import DecoderConfig, DecoderLayer
from triptych.core.runtime.layers.linear import Linear

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup


class AltUpLayer(DecoderLayer):
    """A layer between streams: the residual stream of `DecoderLayer` is `x_TNC` here."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
    ) -> None:
        super().__init__(config, layer=layer, dtype=dtype, device=device, group=group)
        assert config.altup is not None
        self.altup = AltUp(config.altup, dtype=dtype, device=device)

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        super().prepare(native)
        self.altup.prepare(native)

    def linears(self) -> Iterator[Linear]:
        """Iterate over its projections."""
        yield from super().linears()
        yield from self.altup.linears()

    def __call__(
        self,
        x_TC: torch.Tensor,
        pending_TC: torch.Tensor | None,
        positions: StepPositions,
        step: PagedStep,
        input_TP: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """One layer of all streams, `[T, N, C]`; nothing is pending."""
        assert pending_TC is None
        assert input_TP is not None
        predicted_TNC = self.altup.predict(x_TC)
        active_TC = predicted_TNC[:, 0].contiguous()
        computed_TC = self._compute(active_TC, positions, step)
        streams_TNC = self.altup.correct(predicted_TNC, computed_TC)
        assert self.input_gate is not None
        gate_TC = streams_TNC[:, 0] * self.altup.scale_C
        streams_TNC[:, 1:] += self.input_gate(gate_TC, input_TP)[:, None]
        return streams_TNC, None

    def _compute(
        self, x_TC: torch.Tensor, positions: StepPositions, step: PagedStep
    ) -> torch.Tensor:
        """Attention, with the low-rank path next to it, and the MLP."""
        assert self.attention is not None
        assert self.mlp is not None
        assert self.post_norms is not None
        after_attention, after_mlp = self.post_norms
        normed_TC = self.input_norm(x_TC)
        mixed_TC = after_attention(self.attention(normed_TC, None, positions, step))
        x_TC = (x_TC + mixed_TC + self.altup.laurel(normed_TC)) * 2.0**-0.5
        return x_TC + after_mlp(self.mlp(self.mlp_norm(x_TC), None))
