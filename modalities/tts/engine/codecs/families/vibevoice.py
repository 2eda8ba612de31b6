"""The VibeVoice acoustic tokenizer: causal ConvNeXt stages over continuous latents."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from triptych.modalities.tts.engine.codecs.builder import Rules, Walk, build, require_pointwise
from triptych.modalities.tts.engine.codecs.convolution import (
    StreamingConv1d,
    StreamingConvTranspose1d,
)
from triptych.modalities.tts.engine.codecs.decoder import Adapter
from triptych.modalities.tts.engine.codecs.stages import (
    Chain,
    Pointwise,
    StreamingStage,
    channels_last,
    residual,
)


def _convolution(walk: Walk) -> StreamingStage:
    module: Any = walk.module
    return StreamingConv1d(module.conv, (module.left_pad, 0))


def _transposed(walk: Walk) -> StreamingStage:
    module: Any = walk.module
    return StreamingConvTranspose1d(module.convtr, (0, module.padding_total))


def _convnext(walk: Walk) -> StreamingStage:
    layer: Any = walk.module
    require_pointwise(walk, nn.Conv1d)

    def feed_forward(x_BTC: Tensor) -> Tensor:
        y_BTC: Tensor = layer.ffn(layer.ffn_norm(x_BTC)) * layer.ffn_gamma
        return x_BTC + y_BTC

    mixed = residual(
        channels_last([layer.norm]),
        walk.at("mixer").stage(),
        Pointwise(lambda x_BCT: x_BCT * layer.gamma[:, None]),
    )
    return Chain(mixed, channels_last([feed_forward]))


_PREFIX = "VibeVoiceAcousticTokenizer"
RULES: Rules = MappingProxyType(
    {
        _PREFIX + "DecoderModel": lambda walk: walk.chain("stem", "conv_layers", "head"),
        _PREFIX + "DecoderStem": lambda walk: walk.chain("conv", "stage"),
        _PREFIX + "DecoderLayer": lambda walk: walk.chain("convtr", "stage"),
        _PREFIX + "ConvNext1dLayer": _convnext,
        _PREFIX + "CausalConv1d": _convolution,
        _PREFIX + "CausalConvTranspose1d": _transposed,
    }
)


def vibevoice(model: Any) -> Adapter:
    """`VibeVoiceAcousticTokenizerModel`: continuous latents [B, D, F]."""
    weight = model.decoder.head.conv.weight
    return Adapter(
        stage=build(model.decoder, RULES, path="decoder"),
        embed=lambda z_BDF: z_BDF,
        one_shot=lambda z_BDF: model.decode(z_BDF.transpose(1, 2)).audio[:, 0],
        # Neither the configuration nor the weights say it; the model card and its processor do.
        sample_rate=24_000,
        num_codebooks=model.config.hidden_size,
        codebook_size=None,
        dtype=weight.dtype,
        device=weight.device,
    )
