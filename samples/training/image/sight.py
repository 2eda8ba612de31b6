"""What an EfficientNet that nobody here trained sees in images.

Owns the network, its features, and the split between blocks that stay as they are and the last
ones, which a judge may train on.

Shapes: B images, F features, P places, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from efficientnet_lite_pytorch import EfficientNet
from pictures.fetching import EFFICIENTNET, fetch_once
from precision import has_bfloat16
from torch import Tensor, nn
from torch.nn import functional

GRID = 8
"""Places a side of the map."""
_SIDE = 32 * GRID
_NUM_CHANNELS = 1280
_NUM_EARLY = 15  # blocks that stay as they are: those with twice as many places a side or more
_NUM_MIXED = 32  # random mixtures of channels, kept by place
_BATCH = 20


@dataclass(frozen=True, slots=True)
class Seen:
    """Features of images: means and maxima of channels `[B, 2 F]`, a map of mixtures `[B, F]`.

    And those of an early block, `[B, C, H, W]`, in half precision: they are large.
    """

    pooled: Tensor
    mixtures: Tensor
    early: Tensor

    @staticmethod
    def join(parts: Sequence[Seen]) -> Seen:
        """The features of all images of all parts."""
        names = [field.name for field in fields(Seen)]
        return Seen(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    @property
    def means(self) -> Tensor:
        """Means of channels alone, `[B, F]`, in which distances are measured."""
        return self.pooled[:, :_NUM_CHANNELS]


class LastBlocks(nn.Module):
    """The network from an early block on, whose finer places tell small things apart."""

    def __init__(self, network: EfficientNet) -> None:
        super().__init__()
        self.blocks = network._blocks[_NUM_EARLY:]
        self.convolution, self.norm = network._conv_head, network._bn1
        fine = network._blocks[_NUM_EARLY - 1]._project_conv.out_channels
        self.num_channels = network._conv_head.out_channels + 4 * fine

    def forward(self, early_BCHW: Tensor) -> Tensor:
        """The map `[B, P, C]`: channels of the last convolution, then of the early block."""
        states = early_BCHW
        for block in self.blocks:
            states = block(states)
        coarse = functional.relu6(self.norm(self.convolution(states)))
        return torch.cat((coarse, functional.pixel_unshuffle(early_BCHW, 2)), 1).flatten(2).mT


class Eye:
    """EfficientNet-Lite2 up to its last convolution."""

    def __init__(self, folder: Path) -> None:
        network = EfficientNet.from_name("efficientnet-lite2").eval().requires_grad_(False)
        (weights,) = fetch_once(folder, EFFICIENTNET)
        network.load_state_dict(torch.load(weights, weights_only=True))
        if has_bfloat16(torch.device("cpu")):  # three times as fast
            network.bfloat16()
        network.to(memory_format=torch.channels_last)
        self._stem = nn.Sequential(
            network._conv_stem, network._bn0, nn.ReLU6(), *network._blocks[:_NUM_EARLY]
        )
        self.last_blocks = LastBlocks(network)
        mixture = torch.randn(_NUM_CHANNELS, _NUM_MIXED, generator=torch.Generator().manual_seed(0))
        self._mixture = mixture / _NUM_CHANNELS**0.5

    @torch.inference_mode()
    def see(self, pixels: Tensor) -> Seen:
        """Features of images `[B, 3, H, W]` in -1..1."""
        return Seen.join([self._see(part) for part in pixels.split(_BATCH)])

    def _see(self, pixels: Tensor) -> Seen:
        early = self._early(pixels)
        coarse_BPC = self.last_blocks(early)[..., :_NUM_CHANNELS].float()
        pooled = torch.cat((coarse_BPC.mean(1), coarse_BPC.amax(1)), 1)
        return Seen(pooled, (coarse_BPC @ self._mixture).flatten(1), early.half())

    def _early(self, pixels: Tensor) -> Tensor:
        """Of the last block that stays as it is, `[B, C, H, W]`."""
        large = functional.interpolate(pixels, size=_SIDE, mode="bilinear", antialias=True)
        given = large.to(self._stem[0].weight.dtype)
        early: Tensor = self._stem(given.contiguous(memory_format=torch.channels_last))
        return early
