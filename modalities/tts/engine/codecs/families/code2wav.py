"""Qwen3-Omni's Code2Wav: a windowed transformer, ConvNeXt upsampling, and Snake blocks.

Its transposed convolutions trim both sides, so a stream is short by, and trails by, 555 samples.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch import Tensor

from triptych.modalities.tts.engine.codecs.builder import Rules, Walk
from triptych.modalities.tts.engine.codecs.convolution import (
    StreamingConv1d,
    StreamingConvTranspose1d,
)
from triptych.modalities.tts.engine.codecs.decoder import Adapter
from triptych.modalities.tts.engine.codecs.families.seanet import transformer
from triptych.modalities.tts.engine.codecs.stages import (
    Chain,
    Pointwise,
    StreamingStage,
    channels_last,
    residual,
)


def _convolution(walk: Walk) -> StreamingStage:
    module: Any = walk.module
    return StreamingConv1d(module.conv, (module.padding, 0))


def _transposed(walk: Walk) -> StreamingStage:
    module: Any = walk.module
    return StreamingConvTranspose1d(module.conv, (module.left_pad, module.right_pad))


def _convnext(walk: Walk) -> StreamingStage:
    block: Any = walk.module
    mlp = [block.norm, block.pwconv1, block.act, block.pwconv2, lambda x_BTC: block.gamma * x_BTC]
    return residual(walk.at("dwconv").stage(), channels_last(mlp))


RULES: Rules = MappingProxyType(
    {
        "Qwen3OmniMoeCode2WavTransformerModel": transformer,
        "Qwen3OmniMoeCausalConvNet": _convolution,
        "Qwen3OmniMoeCausalTransConvNet": _transposed,
        "Qwen3OmniMoeConvNeXtBlock": _convnext,
        "Qwen3OmniMoeCode2WavDecoderBlock": lambda walk: walk.at("block").stage(),
        "Qwen3OmniMoeCode2WavDecoderResidualUnit": lambda walk: residual(
            walk.chain("act1", "conv1", "act2", "conv2")
        ),
    }
)


def code2wav(model: Any) -> Adapter:
    """`Qwen3OmniMoeCode2Wav`: codes [B, Q, F], all codebooks.

    The sample rate is the model card's: no configuration holds it.
    """
    walk = Walk(model, RULES, "code2wav")
    clamp = Pointwise(lambda x_BCT: x_BCT.clamp(min=-1, max=1))
    weight: Tensor = model.code_embedding.weight

    def embed(codes_BQF: Tensor) -> Tensor:
        latents_BFC: Tensor = model.code_embedding(codes_BQF + model.code_offset).mean(1)
        return latents_BFC.transpose(1, 2)

    return Adapter(
        stage=Chain(walk.chain("pre_transformer", "upsample", "decoder"), clamp),
        embed=embed,
        one_shot=lambda codes: model(codes)[:, 0],
        sample_rate=24_000,
        num_codebooks=model.config.num_quantizers,
        codebook_size=model.config.codebook_size,
        dtype=weight.dtype,
        device=weight.device,
    )
