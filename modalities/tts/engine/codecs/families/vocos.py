"""Vocos: a ConvNeXt backbone and an inverse STFT head (Siuzdak, 2023).

Owns a Vocos module with the names of the published checkpoints, an overlap-add that streams
exactly, edges included, and the rules of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.modalities.tts.engine.codecs.builder import Rules, Walk, build
from triptych.modalities.tts.engine.codecs.convolution import OverlapTail
from triptych.modalities.tts.engine.codecs.decoder import Adapter
from triptych.modalities.tts.engine.codecs.stages import (
    Chain,
    Pointwise,
    StreamingStage,
    channels_last,
    residual,
)

_MAX_MAGNITUDE = 1e2
_MIN_ENVELOPE = 1e-11


@dataclass(frozen=True, slots=True, kw_only=True)
class VocosConfig:
    """Defaults are the published mel vocoder's at 24 kHz.

    `padding` is how much of the overlap-add is cut at both ends: "same" (n_fft - hop) / 2, so that
    F frames make F * hop samples; "center" n_fft / 2, as `torch.istft` does.
    """

    sampling_rate: int = 24_000
    input_channels: int = 100
    dim: int = 512
    intermediate_dim: int = 1536
    num_layers: int = 8
    n_fft: int = 1024
    hop_length: int = 256
    padding: str = "center"

    @property
    def trim(self) -> int:
        """Samples cut at each end."""
        same = self.padding == "same"
        return (self.n_fft - self.hop_length) // 2 if same else self.n_fft // 2


class Vocos(nn.Module):
    """Features [B, D, F] to audio [B, S]."""

    def __init__(self, config: VocosConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = VocosBackbone(config)
        self.head = IstftHead(config)

    def forward(self, features_BDF: Tensor) -> Tensor:
        """One-shot synthesis."""
        pcm_B1S: Tensor = self.head(self.backbone(features_BDF))
        return pcm_B1S[:, 0]


class VocosBackbone(nn.Module):
    """A wide convolution, then ConvNeXt blocks at the frame rate."""

    def __init__(self, config: VocosConfig) -> None:
        super().__init__()
        self.embed = nn.Conv1d(config.input_channels, config.dim, 7, padding=3)
        self.norm = nn.LayerNorm(config.dim, eps=1e-6)
        self.convnext = nn.ModuleList(ConvNeXtBlock(config) for _ in range(config.num_layers))
        self.final_layer_norm = nn.LayerNorm(config.dim, eps=1e-6)

    def forward(self, x_BDF: Tensor) -> Tensor:
        """Features to hidden states [B, C, F]."""
        x_BCF = self.norm(self.embed(x_BDF).transpose(1, 2)).transpose(1, 2)
        for block in self.convnext:
            x_BCF = block(x_BCF)
        y_BCF: Tensor = self.final_layer_norm(x_BCF.transpose(1, 2)).transpose(1, 2)
        return y_BCF


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution and a pointwise MLP around a skip connection."""

    def __init__(self, config: VocosConfig) -> None:
        super().__init__()
        dim = config.dim
        self.dwconv = nn.Conv1d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, config.intermediate_dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(config.intermediate_dim, dim)
        self.gamma = nn.Parameter(torch.full((dim,), 1 / config.num_layers))

    def mlp(self, x_BTC: Tensor) -> Tensor:
        """What follows the convolution, channels last."""
        y_BTC: Tensor = self.gamma * self.pwconv2(self.act(self.pwconv1(self.norm(x_BTC))))
        return y_BTC

    def forward(self, x_BCT: Tensor) -> Tensor:
        """Apply it."""
        return x_BCT + self.mlp(self.dwconv(x_BCT).transpose(1, 2)).transpose(1, 2)


class IstftHead(nn.Module):
    """A linear map to magnitude and phase, inverse FFT, windowed overlap-add."""

    window: Tensor

    def __init__(self, config: VocosConfig) -> None:
        super().__init__()
        self.hop, self.n_fft, self.trim = config.hop_length, config.n_fft, config.trim
        self.out = nn.Linear(config.dim, self.n_fft + 2)
        self.register_buffer("window", torch.hann_window(self.n_fft), persistent=False)

    def frames(self, x_BCF: Tensor) -> Tensor:
        """Windowed time frames [B, n_fft, F], and the squared window below: [B, 2 n_fft, F]."""
        log_magnitude, phase = self.out(x_BCF.transpose(1, 2)).chunk(2, -1)
        # Half types have no complex arithmetic.
        wide = torch.promote_types(x_BCF.dtype, torch.float32)
        magnitude = log_magnitude.to(wide).exp().clamp(max=_MAX_MAGNITUDE)
        window = self.window.to(wide)
        time_BFN = torch.fft.irfft(torch.polar(magnitude, phase.to(wide)), self.n_fft) * window
        square_BFN = (window * window).expand_as(time_BFN)
        return torch.cat((time_BFN, square_BFN), -1).transpose(1, 2)

    def overlap_add(self, frames_BNF: Tensor) -> Tensor:
        """Sums of overlapping frames and of their squared windows, [B, 2, S], untrimmed."""
        length = (frames_BNF.shape[-1] - 1) * self.hop + self.n_fft
        full = functional.fold(frames_BNF, (1, length), (1, self.n_fft), stride=(1, self.hop))
        return full[:, :, 0]

    def normalise(self, sums_B2S: Tensor) -> Tensor:
        """Divide by the windows' share of each sample: [B, 1, S]."""
        pcm_B1S = sums_B2S[:, :1] / sums_B2S[:, 1:].clamp(min=_MIN_ENVELOPE)
        return pcm_B1S.to(self.out.weight.dtype)

    def forward(self, x_BCF: Tensor) -> Tensor:
        """One-shot synthesis."""
        sums_B2S = self.overlap_add(self.frames(x_BCF))
        return self.normalise(sums_B2S[..., self.trim : sums_B2S.shape[-1] - self.trim])


class VocosOverlapAdd(OverlapTail):
    """The head's overlap-add.

    The windows' share is carried like the signal, so that the first and last samples, which fewer
    frames cover, come out as in one-shot synthesis.
    """

    def __init__(self, head: IstftHead) -> None:
        super().__init__(head.hop, head.n_fft, (head.trim, head.trim))
        self.head = head

    def spread(self, x_BCT: Tensor) -> Tensor:
        """Overlap-add of these frames alone."""
        return self.head.overlap_add(x_BCT)


def _head(walk: Walk) -> StreamingStage:
    head = walk.module
    assert isinstance(head, IstftHead)
    return Chain(Pointwise(head.frames), VocosOverlapAdd(head), Pointwise(head.normalise))


def _backbone(walk: Walk) -> StreamingStage:
    module: Any = walk.module
    return Chain(
        walk.at("embed").stage(),
        channels_last([module.norm]),
        walk.at("convnext").stage(),
        channels_last([module.final_layer_norm]),
    )


def _convnext(walk: Walk) -> StreamingStage:
    block = walk.module
    assert isinstance(block, ConvNeXtBlock)
    return residual(walk.at("dwconv").stage(), channels_last([block.mlp]))


RULES: Rules = MappingProxyType(
    {
        "Vocos": lambda walk: walk.chain("backbone", "head"),
        "VocosBackbone": _backbone,
        "ConvNeXtBlock": _convnext,
        "IstftHead": _head,
    }
)


def vocos(model: Vocos) -> Adapter:
    """`Vocos`: features [B, D, F]."""
    weight = model.head.out.weight
    return Adapter(
        stage=build(model, RULES, path="vocos"),
        embed=lambda x_BDF: x_BDF,
        one_shot=model,
        sample_rate=model.config.sampling_rate,
        num_codebooks=model.config.input_channels,
        codebook_size=None,
        dtype=weight.dtype,
        device=weight.device,
    )
