"""HiFi-GAN vocoders (Kong, Kim and Bae, 2020), from mel or other features to audio.

Owns a generator with the field names of transformers' (SpeechT5, FastSpeech2 Conformer, VITS), and
the streaming rules for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.modalities.tts.engine.codecs.builder import Rules, Walk, build
from triptych.modalities.tts.engine.codecs.decoder import Adapter
from triptych.modalities.tts.engine.codecs.stages import (
    Chain,
    Pointwise,
    StreamingStage,
    Sum,
    residual,
)

_LAST_SLOPE = 0.01  # of the activation before the last convolution, in every implementation


@dataclass(frozen=True, slots=True, kw_only=True)
class HifiGanConfig:
    """Field names are transformers'; defaults are the published V1 at 22.05 kHz."""

    sampling_rate: int = 22_050
    model_in_dim: int = 80
    upsample_initial_channel: int = 512
    upsample_rates: tuple[int, ...] = (8, 8, 2, 2)
    upsample_kernel_sizes: tuple[int, ...] = (16, 16, 4, 4)
    resblock_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    resblock_dilation_sizes: tuple[tuple[int, ...], ...] = ((1, 3, 5),) * 3
    leaky_relu_slope: float = 0.1


class HifiGan(nn.Module):
    """The generator: features [B, D, F] to audio [B, S]."""

    def __init__(self, config: HifiGanConfig) -> None:
        super().__init__()
        self.config = config
        width = config.upsample_initial_channel
        self.num_kernels = len(config.resblock_kernel_sizes)
        self.conv_pre = nn.Conv1d(config.model_in_dim, width, 7, padding=3)
        self.upsampler, self.resblocks = nn.ModuleList(), nn.ModuleList()
        for rate, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True):
            up = nn.ConvTranspose1d(width, width // 2, kernel, rate, padding=(kernel - rate) // 2)
            self.upsampler.append(up)
            width //= 2
            for size, dilations in zip(
                config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True
            ):
                self.resblocks.append(ResidualBlock(width, size, dilations))
        self.conv_post = nn.Conv1d(width, 1, 7, padding=3)

    def forward(self, features_BDF: Tensor) -> Tensor:
        """One-shot synthesis."""
        x_BCT = self.conv_pre(features_BDF)
        for index, upsample in enumerate(self.upsampler):
            x_BCT = upsample(functional.leaky_relu(x_BCT, self.config.leaky_relu_slope))
            blocks = self.resblocks[index * self.num_kernels : (index + 1) * self.num_kernels]
            outputs = [self._block(block, x_BCT) for block in blocks]
            x_BCT = torch.stack(outputs).sum(0) / self.num_kernels
        pcm_B1S: Tensor = self.conv_post(functional.leaky_relu(x_BCT, _LAST_SLOPE))
        return pcm_B1S[:, 0].tanh()

    def _block(self, block: nn.Module, x_BCT: Tensor) -> Tensor:
        assert isinstance(block, ResidualBlock)
        for first, second in zip(block.convs1, block.convs2, strict=True):
            y_BCT = first(functional.leaky_relu(x_BCT, self.config.leaky_relu_slope))
            x_BCT = x_BCT + second(functional.leaky_relu(y_BCT, self.config.leaky_relu_slope))
        return x_BCT


class ResidualBlock(nn.Module):
    """Pairs of convolutions, dilated and plain, each around a skip connection."""

    def __init__(self, width: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        half = (kernel - 1) // 2
        self.convs1 = nn.ModuleList(
            nn.Conv1d(width, width, kernel, padding=half * d, dilation=d) for d in dilations
        )
        self.convs2 = nn.ModuleList(
            nn.Conv1d(width, width, kernel, padding=half) for _ in dilations
        )


def _leaky(slope: float) -> Pointwise:
    return Pointwise(lambda x_BCT: functional.leaky_relu(x_BCT, slope))


def mean(*branches: StreamingStage) -> StreamingStage:
    """The mean of parallel branches, of whatever delays."""
    return Chain(Sum(*branches), Pointwise(lambda x_BCT: x_BCT / len(branches)))


def _generator(walk: Walk) -> StreamingStage:
    """Fusion of residual blocks of several receptive fields: branches of several delays."""
    module: Any = walk.module
    slope, num_kernels = module.config.leaky_relu_slope, module.num_kernels

    def fuse(index: int) -> StreamingStage:
        first = index * num_kernels
        paths = [f"resblocks.{i}" for i in range(first, first + num_kernels)]
        return mean(*[_residual_block(walk.at(path), slope) for path in paths])

    stages: list[StreamingStage] = [walk.at("conv_pre").stage()]
    for index in range(len(module.upsampler)):
        stages += [_leaky(slope), walk.at(f"upsampler.{index}").stage(), fuse(index)]
    last = walk.at("conv_post").stage()
    return Chain(*stages, _leaky(_LAST_SLOPE), last, Pointwise(torch.tanh))


def _residual_block(walk: Walk, slope: float) -> StreamingStage:
    module: Any = walk.module
    return Chain(
        *[
            residual(
                _leaky(slope),
                walk.at(f"convs1.{i}").stage(),
                _leaky(slope),
                walk.at(f"convs2.{i}").stage(),
            )
            for i in range(len(module.convs1))
        ]
    )


_CLASSES = ("HifiGan", "SpeechT5HifiGan", "FastSpeech2ConformerHifiGan", "VitsHifiGan")
RULES: Rules = MappingProxyType(dict.fromkeys(_CLASSES, _generator))


def hifigan(model: HifiGan) -> Adapter:
    """`HifiGan`: features [B, D, F]."""
    config = model.config
    return _adapter(model, lambda x_BDF: x_BDF, model, config.model_in_dim, config.sampling_rate)


def transformers_hifigan(model: Any) -> Adapter:
    """`SpeechT5HifiGan` and `FastSpeech2ConformerHifiGan`: spectrograms [B, D, F]."""

    def embed(x_BDF: Tensor) -> Tensor:
        if not model.config.normalize_before:
            return x_BDF
        y_BDF: Tensor = (x_BDF - model.mean[:, None]) / model.scale[:, None]
        return y_BDF

    def one_shot(x_BDF: Tensor) -> Tensor:
        pcm_BS: Tensor = model(x_BDF.transpose(1, 2))
        return pcm_BS

    return _adapter(model, embed, one_shot, model.config.model_in_dim, model.config.sampling_rate)


def vits_hifigan(model: Any) -> Adapter:
    """`VitsHifiGan` of one speaker: latents [B, D, F] of a `VitsModel`'s flow."""
    config = model.config
    return _adapter(
        model, lambda x: x, lambda x: model(x)[:, 0], config.flow_size, config.sampling_rate
    )


def _adapter(
    model: Any,
    embed: Callable[[Tensor], Tensor],
    one_shot: Callable[[Tensor], Tensor],
    num_features: int,
    sample_rate: int,
) -> Adapter:
    weight = model.conv_pre.weight
    return Adapter(
        stage=build(model, RULES, path="generator"),
        embed=embed,
        one_shot=one_shot,
        sample_rate=sample_rate,
        num_codebooks=num_features,
        codebook_size=None,
        dtype=weight.dtype,
        device=weight.device,
    )
