"""BigVGAN (Lee et al., 2023) as in Qwen2.5-Omni: HiFi-GAN with anti-aliased Snake activations."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from triptych.modalities.tts.engine.codecs.builder import Rules, Walk, build
from triptych.modalities.tts.engine.codecs.convolution import (
    Pad,
    StreamingConv1d,
    StreamingConvTranspose1d,
)
from triptych.modalities.tts.engine.codecs.decoder import Adapter
from triptych.modalities.tts.engine.codecs.families.hifigan import mean
from triptych.modalities.tts.engine.codecs.stages import Chain, Pointwise, StreamingStage, residual
from triptych.modalities.tts.engine.codecs.step import Padding


def _activation(walk: Walk) -> StreamingStage:
    """Snake at a higher rate: up, activate, filter, down."""
    module: Any = walk.module
    up, down, width = module.upsample, module.downsample, len(module.act.alpha)
    raised = nn.ConvTranspose1d(width, width, up.kernel_size, up.stride, groups=width, bias=False)
    lowered = nn.Conv1d(width, width, down.kernel_size, down.stride, groups=width, bias=False)
    _fill(raised, up.ratio * up.filter)
    _fill(lowered, down.filter)
    return Chain(
        Pad(up.pad),
        StreamingConvTranspose1d(raised, (up.pad_left, up.pad_right)),
        walk.at("act").stage(),
        StreamingConv1d(lowered, (down.pad_left, down.pad_right), Padding.REPLICATE),
    )


def _fill(conv: nn.Conv1d | nn.ConvTranspose1d, kernel_11K: Tensor) -> None:
    """Give every channel the same kernel."""
    conv.weight = nn.Parameter(kernel_11K.expand_as(conv.weight), requires_grad=False)


def _block(walk: Walk) -> StreamingStage:
    module: Any = walk.module
    units = [
        (f"activations.{2 * i}", f"convs1.{i}", f"activations.{2 * i + 1}", f"convs2.{i}")
        for i in range(len(module.convs1))
    ]
    return Chain(*[residual(walk.chain(*paths)) for paths in units])


def _generator(walk: Walk) -> StreamingStage:
    module: Any = walk.module
    num_blocks = module.num_residual_blocks
    stages = [walk.at("conv_pre").stage()]
    for index in range(module.num_upsample_layers):
        first = index * num_blocks
        blocks = [walk.at(f"resblocks.{i}").stage() for i in range(first, first + num_blocks)]
        stages += [walk.at(f"ups.{index}").stage(), mean(*blocks)]
    ends = walk.chain("activation_post", "conv_post")
    return Chain(*stages, ends, Pointwise(lambda x_BCT: x_BCT.clamp(min=-1, max=1)))


RULES: Rules = MappingProxyType(
    {
        "Qwen2_5OmniToken2WavBigVGANModel": _generator,
        "Qwen2_5OmniAMPBlock": _block,
        "Qwen2_5OmniAntiAliasedActivation1d": _activation,
    }
)


def bigvgan(model: Any) -> Adapter:
    """`Qwen2_5OmniToken2WavBigVGANModel`: log-mel spectrograms [B, D, F].

    The sample rate is the model card's: no configuration holds it.
    """
    weight = model.conv_pre.weight
    return Adapter(
        stage=build(model, RULES, path="bigvgan"),
        embed=model.process_mel_spectrogram,
        one_shot=lambda x_BDF: torch.stack([model(x_DF[None]).to(x_BDF.device) for x_DF in x_BDF]),
        sample_rate=24_000,
        num_codebooks=model.config.mel_dim,
        codebook_size=None,
        dtype=weight.dtype,
        device=weight.device,
    )
