"""The embedded voice before it is loaded: what it needs of a device, and how it is built.

Implements `engine.models.blueprint.SpeechBlueprint`. One checkpoint holds both models: `talker.*`
in the type the engine runs in, `codec.*` in the types its parts need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from triptych.core.decoders.native import position_values
from triptych.core.errors import ConfigError, UnsupportedOption
from triptych.core.layers.attention import KvLayout
from triptych.core.layers.native_linear import pack_linears
from triptych.core.weights.tensors.checkpoint import Checkpoint
from triptych.core.weights.tensors.loading import TensorTarget, load_tensors
from triptych.modalities.tts.configs.voice import VoiceConfig
from triptych.modalities.tts.engine.codecs.open import refuse_window_options
from triptych.modalities.tts.engine.models.blueprint import (
    Codes,
    SpeechCodec,
    SpeechSetup,
    SpeechTraits,
)
from triptych.modalities.tts.engine.models.voice.codec import VoiceCodec
from triptych.modalities.tts.engine.models.voice.model import AcousticModel, decoder_config
from triptych.modalities.tts.engine.models.voice.streaming import voice_decoder
from triptych.modalities.tts.plan import VoicePrompt
from triptych.modalities.tts.wire import VoiceClip

CODEC_PREFIX, TALKER_PREFIX = "codec.", "talker."
MAX_LENGTH = 1024
"""Positions of a sentence, symbols and steps: more than training ever saw."""


class VoiceBlueprint:
    """A folder with our own config.json and `model.safetensors`."""

    traits = SpeechTraits(causal_prompts=False)

    def __init__(self, config: Mapping[str, Any], setup: SpeechSetup) -> None:
        options = setup.options
        if options.audio_decoder or options.audio_decoder_weights or options.audio_decoder_config:
            raise ConfigError("The embedded voice has its own audio decoder: no option changes it.")
        refuse_window_options(options)
        self.config = VoiceConfig.read(config)
        self.max_length = min(setup.max_length or MAX_LENGTH, MAX_LENGTH)
        self.num_logits = self.config.codec.num_levels
        self._setup = setup

    def weight_bytes(self) -> int:
        """Bytes of the talker's parameters."""
        targets = self._talker(torch.device("meta")).targets()
        return sum(target.into.numel() for target in targets) * self._setup.dtype.itemsize

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most a step of so many positions and rows holds beside weights and cache."""
        config = decoder_config(self.config, self.max_length)
        talker, codec = self.config.talker, self.config.codec
        width = talker.num_symbols_before + 1 + talker.num_symbols_after
        values = position_values(config) + width * (talker.symbol_dim + 2) + self.max_length * 2
        scores = num_rows * codec.num_codebooks * codec.num_levels
        return num_tokens * values * 4 + 4 * 4 * scores

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The cache of the talker."""
        return decoder_config(self.config, self.max_length).kv_layout(page_size, dtype)

    def build(self, checkpoint: Checkpoint, report: Callable[[float], None]) -> AcousticModel:
        """Allocate the talker, stream its weights into place and pack them."""
        talker = self._talker(self._setup.device)
        load_tensors(
            checkpoint,
            talker.targets(),
            ignored=lambda name: name.startswith(CODEC_PREFIX),
            report=report,
        )
        with torch.inference_mode():
            talker.prepare(self._setup.native)
        return talker

    def codec_bytes(self) -> int:
        """Bytes of the codec's weights, float32 but for the pitch."""
        with torch.device("meta"):
            sketch = VoiceCodec(self.config.codec).prepare()
        return sum(tensor.nbytes for tensor in sketch.parameters())

    def open_codec(self, *, num_rows: int, report: Callable[[float], None]) -> SpeechCodec:
        """Load the codec, and prove that it streams what it decodes at once."""
        with torch.device(self._setup.device):
            codec = VoiceCodec(self.config.codec).prepare().requires_grad_(False)
        with Checkpoint.open(self._setup.folder) as checkpoint:
            load_tensors(
                checkpoint,
                _codec_targets(codec),
                ignored=lambda name: name.startswith(TALKER_PREFIX),
                report=report,
            )
        pack_linears(codec, self._setup.native)
        return SpeechCodec(decoder=voice_decoder(codec, num_rows=num_rows))

    def frames(self, steps_NK: Codes) -> Codes:
        """A step is a frame."""
        return steps_NK.T

    def voice_prompt(self, clip: VoiceClip, codes_QF: Codes) -> VoicePrompt:
        """It has one voice, its own."""
        raise UnsupportedOption("The embedded voice cannot imitate others.", param="voice")

    def _talker(self, device: torch.device) -> AcousticModel:
        return AcousticModel(
            self.config,
            num_slots=self._setup.max_batch_size,
            max_length=self.max_length,
            dtype=self._setup.dtype,
            device=device,
        )


def _codec_targets(codec: VoiceCodec) -> Iterator[TensorTarget]:
    return (
        TensorTarget(CODEC_PREFIX + name, tensor) for name, tensor in codec.state_dict().items()
    )
