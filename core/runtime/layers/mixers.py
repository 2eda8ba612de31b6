"""The mixer of a decoder's layer, by which tokens read earlier ones: attention, a recurrent layer.

A layer may have both, or none.

Owns the choice of a layer's mixer and its configuration. Knows neither norms nor MLPs.

Shapes: T tokens, C hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from typing_extensions import TypeIs

from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import (
    Attention,
    AttentionConfig,
    PagedStep,
    StepPositions,
)
from triptych.core.runtime.layers.delta_net import DeltaNetConfig, GatedDeltaNet
from triptych.core.runtime.layers.latent_attention import LatentAttention, LatentConfig
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.mamba2 import Mamba2, Mamba2Config
from triptych.core.runtime.layers.short_convolution import ShortConvConfig, ShortConvolution

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup

RecurrentConfigs = DeltaNetConfig | Mamba2Config | ShortConvConfig
PartConfig = AttentionConfig | LatentConfig | RecurrentConfigs
MixerPart = Attention | LatentAttention | GatedDeltaNet | Mamba2 | ShortConvolution


@dataclass(frozen=True, slots=True)
class PairConfig:
    """Attention and a recurrent layer that read the same input; their results are added."""

    attention: AttentionConfig
    recurrent: RecurrentConfigs


MixerConfig = PartConfig | PairConfig | None
"""The mixer of a layer; `None`: it has none, and is only an MLP."""


def parts_of(mixer: MixerConfig) -> tuple[PartConfig, ...]:
    """The parts of a mixer: none, one, or the two of a pair."""
    if isinstance(mixer, PairConfig):
        return mixer.attention, mixer.recurrent
    return () if mixer is None else (mixer,)


def is_recurrent(part: PartConfig) -> TypeIs[RecurrentConfigs]:
    """Whether a part keeps states in place of keys and values."""
    return isinstance(part, RecurrentConfigs)


class MixerPair:
    """The sum of attention and a recurrent layer, both of the same input."""

    def __init__(self, attention: MixerPart, recurrent: MixerPart) -> None:
        self.parts = attention, recurrent

    def linears(self) -> Iterator[Linear]:
        """Iterate over their projections."""
        for part in self.parts:
            yield from part.linears()

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        for part in self.parts:
            part.prepare(native)

    def __call__(
        self,
        x_TC: torch.Tensor,
        residual_TC: torch.Tensor | None,
        positions: StepPositions,
        step: PagedStep,
    ) -> torch.Tensor:
        """Apply both. Adds to the residual where given."""
        attention, recurrent = self.parts
        sum_TC = attention(x_TC, residual_TC, positions, step)
        return recurrent(x_TC, sum_TC, positions, step)


Mixer = MixerPart | MixerPair


def mixer_parts(mixer: Mixer | None) -> tuple[MixerPart, ...]:
    """The parts of a layer's mixer, as `parts_of` has their configurations."""
    if isinstance(mixer, MixerPair):
        return mixer.parts
    return () if mixer is None else (mixer,)


def new_part(
    own: PartConfig,
    cells: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: RankGroup | None,
) -> MixerPart:
    """Create a part of a mixer; `cells` is the index of its pages or states in the cache."""
    if isinstance(own, DeltaNetConfig):
        return GatedDeltaNet(own, cells=cells, dtype=dtype, device=device)
    if isinstance(own, Mamba2Config):
        return Mamba2(own, cells=cells, dtype=dtype, device=device)
    if isinstance(own, ShortConvConfig):
        return ShortConvolution(own, cells=cells, dtype=dtype, device=device)
    if isinstance(own, LatentConfig):
        return LatentAttention(own, cells=cells, dtype=dtype, device=device, group=group)
    return Attention(own, cells=cells, dtype=dtype, device=device, group=group)
