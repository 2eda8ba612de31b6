"""SNAC: codes at several time scales, a DAC-like decoder with noise blocks (Siuzdak, 2024).

Owns a decoder-only SNAC module, with the names of the published checkpoints, and its streaming
rules. A frame is one step of the coarsest codebook: with strides 4, 2, 1 it holds 1 + 2 + 4 codes,
coarse to fine, each scale's in order of time.

The original generates new noise at each call. Here noise is a hash of (row's seed, block, time), so
streaming, one-shot decoding and every batch agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from triptych.modalities.tts.engine.codecs.builder import Rules, Walk, build
from triptych.modalities.tts.engine.codecs.decoder import Adapter
from triptych.modalities.tts.engine.codecs.stages import (
    CodecStep,
    SignalRate,
    StreamingStage,
    residual,
)

_MIX_1, _MIX_2, _GAMMA = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15, -0x61C8864680B583EB


@dataclass(frozen=True, slots=True, kw_only=True)
class SnacConfig:
    """The decoder's part of a SNAC `config.json`; defaults are the 24 kHz speech model's."""

    sampling_rate: int = 24_000
    latent_dim: int = 768
    decoder_dim: int = 1024
    decoder_rates: tuple[int, ...] = (8, 8, 4, 2)
    codebook_size: int = 4096
    codebook_dim: int = 8
    vq_strides: tuple[int, ...] = (4, 2, 1)
    noise: bool = True
    depthwise: bool = True


class Snac(nn.Module):
    """SNAC without its encoder; `load_state_dict` takes a published checkpoint's tensors."""

    def __init__(self, config: SnacConfig) -> None:
        super().__init__()
        self.config = config
        self.quantizer = _Quantizer(config)
        self.decoder = _Decoder(config)

    def decode(self, codes_BQF: Tensor, seeds_B: Tensor | None = None) -> Tensor:
        """Audio [B, S] of whole streams; without seeds all have seed 0."""
        seeds_B = codes_BQF.new_zeros(len(codes_BQF)) if seeds_B is None else seeds_B
        for module in self.modules():
            if isinstance(module, NoiseBlock):
                module.seeds_B = seeds_B
        pcm_B1S: Tensor = self.decoder.model(self.quantizer.embed(codes_BQF))
        return pcm_B1S[:, 0]


class _Quantizer(nn.Module):
    def __init__(self, config: SnacConfig) -> None:
        super().__init__()
        self.strides = config.vq_strides
        self.quantizers = nn.ModuleList(_Codebook(config) for _ in self.strides)

    def embed(self, codes_BQF: Tensor) -> Tensor:
        """Latents [B, C, F * coarsest stride]."""
        counts = [self.strides[0] // stride for stride in self.strides]
        latents: Tensor | float = 0.0
        for codebook, stride, part_BNF in zip(
            self.quantizers, self.strides, codes_BQF.split(counts, 1), strict=True
        ):
            codes_BT = part_BNF.transpose(1, 2).flatten(1)  # time order: frame, then within it
            latents = latents + codebook(codes_BT).repeat_interleave(stride, dim=-1)
        assert isinstance(latents, Tensor)
        return latents


class _Codebook(nn.Module):
    def __init__(self, config: SnacConfig) -> None:
        super().__init__()
        self.codebook = nn.Embedding(config.codebook_size, config.codebook_dim)
        self.out_proj = weight_norm(nn.Conv1d(config.codebook_dim, config.latent_dim, 1))

    def forward(self, codes_BT: Tensor) -> Tensor:
        latents_BCT: Tensor = self.out_proj(self.codebook(codes_BT).transpose(1, 2))
        return latents_BCT


class _Decoder(nn.Module):
    def __init__(self, config: SnacConfig) -> None:
        super().__init__()
        width, latent = config.decoder_dim, config.latent_dim
        layers: list[nn.Module] = (
            [_conv(latent, latent, 7, groups=latent), _conv(latent, width, 1)]
            if config.depthwise
            else [_conv(latent, width, 7)]
        )
        for index, stride in enumerate(config.decoder_rates):
            noise_index = index if config.noise else None
            layers.append(_DecoderBlock(width, stride, noise_index, config.depthwise))
            width //= 2
        layers += [Snake1d(width), _conv(width, 1, 7), nn.Tanh()]
        self.model = nn.Sequential(*layers)


class _DecoderBlock(nn.Module):
    def __init__(self, width: int, stride: int, noise_index: int | None, depthwise: bool) -> None:
        super().__init__()
        upsample = nn.ConvTranspose1d(
            width,
            width // 2,
            kernel_size=2 * stride,
            stride=stride,
            padding=math.ceil(stride / 2),
            output_padding=stride % 2,
        )
        width //= 2
        noise = [] if noise_index is None else [NoiseBlock(width, noise_index)]
        units = [_ResidualUnit(width, dilation, depthwise) for dilation in (1, 3, 9)]
        layers = [Snake1d(width * 2), weight_norm(upsample), *noise, *units]
        self.block = nn.Sequential(*layers)

    def forward(self, x_BCT: Tensor) -> Tensor:
        y_BCT: Tensor = self.block(x_BCT)
        return y_BCT


class _ResidualUnit(nn.Module):
    def __init__(self, width: int, dilation: int, depthwise: bool) -> None:
        super().__init__()
        groups = width if depthwise else 1
        self.block = nn.Sequential(
            Snake1d(width),
            _conv(width, width, 7, dilation=dilation, groups=groups),
            Snake1d(width),
            _conv(width, width, 1),
        )

    def forward(self, x_BCT: Tensor) -> Tensor:
        y_BCT: Tensor = x_BCT + self.block(x_BCT)
        return y_BCT


class Snake1d(nn.Module):
    """x + sin(alpha x)^2 / alpha, by channel (Ziyin et al., 2020)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, width, 1))

    def forward(self, x_BCT: Tensor) -> Tensor:
        """Apply the activation."""
        return x_BCT + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x_BCT).pow(2)


class NoiseBlock(nn.Module):
    """Adds noise scaled by a linear map of the signal; one sample per time step."""

    seeds_B: Tensor

    def __init__(self, width: int, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = _conv(width, width, 1, bias=False)

    def forward(self, x_BCT: Tensor, times_BT: Tensor | None = None) -> Tensor:
        """Without times, whole streams from time 0."""
        if times_BT is None:
            times_BT = torch.arange(x_BCT.shape[-1], device=x_BCT.device)[None]
        noise_BT = keyed_normal(self.seeds_B[:, None], self.index, times_BT)
        y_BCT: Tensor = x_BCT + noise_BT[:, None].to(x_BCT.dtype) * self.linear(x_BCT)
        return y_BCT


class StreamingNoise(StreamingStage):
    """A noise block that receives each step's time."""

    def __init__(self, block: NoiseBlock) -> None:
        super().__init__()
        self.block = block

    def bind(self, signal: SignalRate) -> SignalRate:
        """Pointwise: adds no lag."""
        self.signal = signal
        return signal

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Add noise keyed by each row's seed and time."""
        self.block.seeds_B = step.seeds_B
        y_BCT: Tensor = self.block(x_BCT, step.times(self.signal, x_BCT.shape[-1]))
        return y_BCT


def keyed_normal(seeds: Tensor, index: int | Tensor, times: Tensor) -> Tensor:
    """Standard normal numbers, float32, each a function of its (seed, index, time) alone.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) as a hash, then Box and Muller (1958).
    """
    bits = _mix(_mix(seeds * _GAMMA + index) + times * _GAMMA)
    radius = ((bits >> 40 & 0xFFFFFF) + 1).float() * 2.0**-24  # (0, 1]
    angle = (bits >> 16 & 0xFFFFFF).float() * (2 * math.pi * 2.0**-24)
    return (-2 * radius.log()).sqrt() * angle.cos()


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift(state, 30)) * _MIX_1
    state = (state ^ _shift(state, 27)) * _MIX_2
    return state ^ _shift(state, 31)


def _shift(state: Tensor, num_bits: int) -> Tensor:
    """Logical shift right of 64-bit integers, for which torch only has a signed type."""
    return (state >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _conv(
    num_in: int,
    num_out: int,
    kernel: int,
    *,
    dilation: int = 1,
    groups: int = 1,
    bias: bool = True,
) -> nn.Module:
    padding = (kernel - 1) * dilation // 2
    conv = nn.Conv1d(
        num_in, num_out, kernel, padding=padding, dilation=dilation, groups=groups, bias=bias
    )
    normed: nn.Module = weight_norm(conv)
    return normed


def _noise(walk: Walk) -> StreamingStage:
    assert isinstance(walk.module, NoiseBlock)
    return StreamingNoise(walk.module)


RULES: Rules = MappingProxyType(
    {
        "_DecoderBlock": lambda walk: walk.at("block").stage(),
        "_ResidualUnit": lambda walk: residual(walk.at("block").stage()),
        "NoiseBlock": _noise,
    }
)


def snac(model: Snac) -> Adapter:
    """The adapter of `Snac`: codes [B, 1 + 2 + 4, F] for strides 4, 2, 1."""
    config = model.config
    coarsest = config.vq_strides[0]
    return Adapter(
        stage=build(model.decoder.model, RULES, path="decoder.model"),
        embed=model.quantizer.embed,
        one_shot=model.decode,
        sample_rate=config.sampling_rate,
        num_codebooks=sum(coarsest // stride for stride in config.vq_strides),
        codebook_size=config.codebook_size,
        weight=next(model.decoder.parameters()),
        rate=coarsest,
    )
