"""SEANet decoders: Mimi, and EnCodec without time-wise norms.

Knows transformers' classes by name and by their decoders' common fields.
"""

from __future__ import annotations

from math import ceil
from types import MappingProxyType
from typing import Any

from torch import nn

from triptych.modalities.tts.engine.codecs.builder import (
    Rules,
    Walk,
    build,
    padding_named,
    require_pointwise,
)
from triptych.modalities.tts.engine.codecs.decoder import Adapter
from triptych.modalities.tts.engine.codecs.layers import (
    StreamingConv1d,
    StreamingConvTranspose1d,
    StreamingTransformer,
)
from triptych.modalities.tts.engine.codecs.stages import StreamingStage, Sum, residual


def _convolution(walk: Walk) -> StreamingStage:
    """A convolution padded on the left alone, or on both sides if not causal."""
    if hasattr(walk.module, "norm"):
        return walk.at("norm").stage()  # raises the reason why it cannot stream
    conv = walk.module.get_submodule("conv")
    assert isinstance(conv, nn.Conv1d)
    total = (conv.kernel_size[0] - 1) * conv.dilation[0] + 1 - conv.stride[0]
    right = 0 if walk.module.causal else total // 2
    padding = padding_named(str(walk.module.pad_mode))
    return StreamingConv1d(conv, (total - right, right), padding)


def _transposed(walk: Walk) -> StreamingStage:
    if hasattr(walk.module, "norm"):
        return walk.at("norm").stage()
    module: Any = walk.module
    total = module.conv.kernel_size[0] - module.conv.stride[0]
    right = ceil(total * module.trim_right_ratio) if module.causal else total // 2
    return StreamingConvTranspose1d(module.conv, (total - right, right))


def _transformer(walk: Walk) -> StreamingStage:
    """A stack of transformers' layers with sliding-window attention."""
    require_pointwise(walk)
    module: Any = walk.module
    return StreamingTransformer(module.layers, module.rotary_emb, module.config.sliding_window)


_COMPOSITES: Rules = MappingProxyType(
    {
        "Conv1d": _convolution,
        "ConvTranspose1d": _transposed,
        "ResnetBlock": lambda walk: Sum(walk.at("shortcut").stage(), walk.at("block").stage()),
        "LSTM": lambda walk: residual(walk.at("lstm").stage()),
        "Decoder": lambda walk: walk.at("layers").stage(),
        "TransformerModel": _transformer,
    }
)
RULES: Rules = MappingProxyType(
    {family + name: rule for family in ("Mimi", "Encodec") for name, rule in _COMPOSITES.items()}
)


def mimi(model: Any) -> Adapter:
    """The adapter of `MimiModel`: codes [B, Q, F] of at most the model's codebooks."""
    return _adapter(
        model,
        _latent_decoder(model),
        embed=model.quantizer.decode,
        one_shot=lambda codes: model.decode(codes).audio_values[:, 0],
        num_codebooks=model.config.num_quantizers,
        codebook_size=model.config.codebook_size,
    )


def encodec(model: Any) -> Adapter:
    """The adapter of 24 kHz `EncodecModel`s: causal, weight-normalized, without loudness norms."""
    return _adapter(
        model,
        build(model.decoder, RULES, path="decoder"),
        embed=lambda codes: model.quantizer.decode(codes.transpose(0, 1)),
        one_shot=lambda codes: model.decode(codes[None], [None]).audio_values[:, 0],
        num_codebooks=model.quantizer.num_quantizers,
        codebook_size=model.config.codebook_size,
    )


def _latent_decoder(model: Any) -> StreamingStage:
    """Upsampling, decoder transformer, SEANet: parts of the model itself in older transformers."""
    has_half = hasattr(model.decoder, "decoder_seanet")
    walk = Walk(model, RULES, "model")
    walk, seanet = (walk.at("decoder"), "decoder_seanet") if has_half else (walk, "decoder")
    upsample = [] if walk.module.upsample is None else ["upsample"]
    return walk.chain(*upsample, "decoder_transformer", seanet)


def _adapter(model: Any, stage: StreamingStage, **fields: Any) -> Adapter:
    return Adapter(
        stage=stage,
        sample_rate=model.config.sampling_rate,
        weight=next(model.decoder.parameters()),
        **fields,
    )
