"""The embedded voice's codec as a `CodecDecoder`: any chunks, any rows, the same sound.

Owns the streaming tree of `VoiceCodec`. Layers are those of `tts/codecs`; synthesis is our own.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from triptych.core.errors import WeightsError
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
from triptych.modalities.tts.engine.models.voice.codec import CausalConv1d, VoiceCodec
from triptych.modalities.tts.engine.models.voice.synthesis import (
    FrameOverlapAdd,
    StreamingFrames,
    synthesise,
)


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


class Beside(StreamingStage):
    """Two causal readings of one stream, channels of the second after those of the first.

    The second runs in float64, and so does what comes of both.
    """

    def __init__(self, first: StreamingStage, second: StreamingStage) -> None:
        super().__init__()
        self.first, self.second = first, second

    def bind(self, signal: SignalRate) -> SignalRate:
        """Both must end alike."""
        end = self.first.bind(signal)
        if self.second.bind(signal) != end:
            raise WeightsError("The spectrum and the pitch of a codec must have one rate and lag.")
        return end

    def forward(self, x_BCT: Tensor, step: CodecStep) -> Tensor:
        """Run both."""
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
    """What the streaming decoder needs to know of the model: codes [B, Q, F], a step a frame."""
    config, weight = model.config, model.head.weight

    def one_shot(codes_BQF: Tensor) -> Tensor:
        seeds_B = torch.zeros(len(codes_BQF), dtype=torch.int64, device=weight.device)
        return synthesise(model(codes_BQF), seeds_B, config)

    heads = [build(getattr(model, name), RULES, path=name) for name in ("backbone", "head")]
    spectrum = Chain(*heads)
    stage = Chain(
        Beside(spectrum, build(model.pitch.layers, RULES, path="pitch")),
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
        dtype=weight.dtype,
        device=weight.device,
    )
