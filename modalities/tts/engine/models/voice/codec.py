"""The codec of the embedded voice: codes at 20 Hz to a harmonic-plus-residual spectrum at 80 Hz.

Owns a causal decoder (an embedding of finite scalar codes, Mentzer et al. 2023; ConvNeXt blocks at
the step rate and at the frame rate, as in Vocos), and its streaming tree, whose sound is the same
for any chunks and rows. `synthesis.py` defines its channels and turns them into sound.

Shapes: B rows, Q codebooks, F steps, T frames, C channels, K frequency bins.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.core.errors import WeightsError
from triptych.modalities.tts.configs.voice import CodecConfig
from triptych.modalities.tts.engine.codecs.builder import Rules, Walk, build
from triptych.modalities.tts.engine.codecs.decoder import Adapter, StreamingDecoder
from triptych.modalities.tts.engine.codecs.layers import StreamingConv1d
from triptych.modalities.tts.engine.codecs.stages import (
    Chain,
    CodecStep,
    SignalRate,
    StreamingStage,
    channels_last,
    residual,
)
from triptych.modalities.tts.engine.models.voice.synthesis import (
    FrameOverlapAdd,
    StreamingFrames,
    synthesize,
)


class CausalConv1d(nn.Conv1d):
    """A convolution over the present and the past, zeros before the start."""

    @property
    def num_past(self) -> int:
        """Past steps that the kernel covers."""
        return (self.kernel_size[0] - 1) * self.dilation[0]

    def forward(self, x_BCT: Tensor) -> Tensor:
        """Convolve; the number of steps is unchanged."""
        y_BCT: Tensor = super().forward(functional.pad(x_BCT, (self.num_past, 0)))
        return y_BCT


class CausalBlock(nn.Module):
    """ConvNeXt (Liu et al., 2022) with a causal depthwise convolution."""

    def __init__(self, dim: int, intermediate: int, kernel: int = 7) -> None:
        super().__init__()
        self.dwconv: nn.Conv1d = CausalConv1d(dim, dim, kernel, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, intermediate)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(intermediate, dim)
        self.gamma = nn.Parameter(torch.full((dim,), 0.2))

    def mlp(self, x_BTC: Tensor) -> Tensor:
        """The layers after the convolution, channels last."""
        y_BTC: Tensor = self.gamma * self.pwconv2(self.act(self.pwconv1(self.norm(x_BTC))))
        return y_BTC

    def forward(self, x_BCT: Tensor) -> Tensor:
        """Apply the block."""
        return x_BCT + self.mlp(self.dwconv(x_BCT).transpose(1, 2)).transpose(1, 2)


class CodecBackbone(nn.Module):
    """Code values [B, Q, F] to hidden states [B, C, F * frames_per_step], causally."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        steps, frames = config.step_dim, config.frame_dim
        self.embed = CausalConv1d(config.num_codebooks, steps, 3)
        self.step_blocks = nn.Sequential(
            *[CausalBlock(steps, 2 * steps, 3) for _ in range(config.num_step_layers)]
        )
        self.upsample = nn.ConvTranspose1d(
            steps, frames, config.frames_per_step, config.frames_per_step
        )
        self.frame_blocks = nn.Sequential(
            *[
                CausalBlock(frames, config.frame_intermediate)
                for _ in range(config.num_frame_layers)
            ]
        )
        self.norm = nn.LayerNorm(frames)

    def forward(self, values_BQF: Tensor) -> Tensor:
        """Apply the network."""
        x_BCT = self.frame_blocks(self.upsample(self.step_blocks(self.embed(values_BQF))))
        y_BCT: Tensor = self.norm(x_BCT.transpose(1, 2)).transpose(1, 2)
        return y_BCT


class PitchNet(nn.Module):
    """Code values [B, Q, F] to pitch and voicing, [B, 2, F * frames_per_step], causally.

    Small and separate, because it runs in float64: phase is the integral of pitch, and would
    accumulate the rounding by which batches differ.
    """

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        dim = config.pitch_dim
        self.layers = nn.Sequential(
            CausalConv1d(config.num_codebooks, dim, 3),
            nn.GELU(),
            CausalConv1d(dim, dim, 3),
            nn.GELU(),
            nn.ConvTranspose1d(dim, 2, config.frames_per_step, config.frames_per_step),
        )

    def forward(self, values_BQF: Tensor) -> Tensor:
        """Apply the network."""
        raw_B2T: Tensor = self.layers(values_BQF)
        return raw_B2T


class VoiceCodec(nn.Module):
    """The decoder that ships: codes to raw channels, which `spectra_of` interprets.

    Call `prepare` once the weights are loaded.
    """

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = CodecBackbone(config)
        self.head = nn.Conv1d(config.frame_dim, 4 * config.num_bins, 1)
        self.pitch = PitchNet(config)

    def prepare(self) -> VoiceCodec:
        """Convert each part to the type it runs in."""
        self.float().pitch.double()
        return self.eval()

    def values(self, codes_BQF: Tensor) -> Tensor:
        """Map levels 0..n-1 to values in [-1, 1]."""
        half = (self.config.num_levels - 1) / 2
        return (codes_BQF / half - 1).to(self.head.weight.dtype)

    def forward(self, codes_BQF: Tensor) -> Tensor:
        """Raw channels [B, 4 K + 2, T] of whole streams, in float64 because of the pitch."""
        values_BQF = self.values(codes_BQF)
        pitch_B2T = self.pitch(values_BQF.double())
        return torch.cat((self.head(self.backbone(values_BQF)), pitch_B2T), 1)


def _causal(walk: Walk) -> StreamingStage:
    assert isinstance(walk.module, CausalConv1d)
    return StreamingConv1d(walk.module, (walk.module.num_past, 0))


def _block(walk: Walk) -> StreamingStage:
    module: Any = walk.module
    return residual(walk.at("dwconv").stage(), channels_last([module.mlp]))


def _backbone(walk: Walk) -> StreamingStage:
    module: Any = walk.module
    layers = walk.chain("embed", "step_blocks", "upsample", "frame_blocks")
    return Chain(layers, channels_last([module.norm]))


class ChannelConcat(StreamingStage):
    """Two causal stages over one stream, concatenated by channels.

    The second runs in float64, as does the concatenation.
    """

    def __init__(self, first: StreamingStage, second: StreamingStage) -> None:
        super().__init__()
        self.first, self.second = first, second

    def bind(self, signal: SignalRate) -> SignalRate:
        """Both must have the same output rate and lag."""
        end = self.first.bind(signal)
        if self.second.bind(signal) != end:
            raise WeightsError("The spectrum and the pitch of a codec must have one rate and lag.")
        return end

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Run both stages."""
        return torch.cat((self.first(x_BCT, step), self.second(x_BCT.double(), step)), 1)


RULES: Rules = MappingProxyType(
    {"CausalConv1d": _causal, "CausalBlock": _block, "CodecBackbone": _backbone}
)


def voice_decoder(model: VoiceCodec, *, num_rows: int) -> StreamingDecoder:
    """A streaming decoder over the model, sharing its weights.

    Raises `WeightsError` if a probe decoded in chunks differs from decoding at once.
    """
    return StreamingDecoder(adapter(model), num_rows=num_rows)


def adapter(model: VoiceCodec) -> Adapter:
    """The model's adapter for the streaming decoder: codes [B, Q, F], one step per frame."""
    config = model.config

    def one_shot(codes_BQF: Tensor) -> Tensor:
        seeds_B = torch.zeros(len(codes_BQF), dtype=torch.int64, device=model.head.weight.device)
        return synthesize(model(codes_BQF), seeds_B, config)

    heads = [build(getattr(model, name), RULES, path=name) for name in ("backbone", "head")]
    spectrum = Chain(*heads)
    stage = Chain(
        ChannelConcat(spectrum, build(model.pitch.layers, RULES, path="pitch")),
        StreamingFrames(config),
        FrameOverlapAdd(config),
    )
    return Adapter(
        stage=stage,
        embed=model.values,
        one_shot=one_shot,
        sample_rate=config.sample_rate,
        num_codebooks=config.num_codebooks,
        codebook_size=config.num_levels,
        weight=model.head.weight,
    )
