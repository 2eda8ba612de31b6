"""The speech model that comes with the package ("embedded voice"), before its weights are loaded.

Owns its memory and its construction, as `engine.models.blueprint.SpeechBlueprint`. One checkpoint
holds two models: the acoustic model, which turns phonemes into codes (`talker.*`, in the type the
engine runs in), and the codec, which turns codes into sound (`codec.*`, in the types its parts
need). Refuses other audio decoders and recordings to imitate. Knows no step and no request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from triptych.core.errors import ConfigError, UnsupportedOption
from triptych.core.runtime.decoders.native import position_values
from triptych.core.runtime.layers.native_linear import pack_linears
from triptych.core.runtime.sampling.sampler import LOGIT_BYTES
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import Target, TensorTarget, load_tensors
from triptych.modalities.tts.configs.voice import VoiceConfig
from triptych.modalities.tts.engine.codecs.decoder import state_bytes
from triptych.modalities.tts.engine.codecs.loading import refuse_window_options
from triptych.modalities.tts.engine.codecs.protocol import SpeechCodec
from triptych.modalities.tts.engine.models.blueprint import (
    Codes,
    FrameBlueprint,
    SpeechSetup,
    SpeechTraits,
)
from triptych.modalities.tts.engine.models.voice.acoustic import AcousticModel, decoder_config
from triptych.modalities.tts.engine.models.voice.codec import VoiceCodec, adapter, voice_decoder
from triptych.modalities.tts.plan import VoicePrompt
from triptych.modalities.tts.wire import VoiceClip

CODEC_PREFIX, ACOUSTIC_PREFIX = "codec.", "talker."
MAX_LENGTH = 1024
"""Maximum positions of a sentence, symbols and steps: more than in training."""


class VoiceBlueprint(FrameBlueprint[AcousticModel]):
    """A folder with our own config.json and `model.safetensors`."""

    def __init__(self, config: Mapping[str, Any], setup: SpeechSetup) -> None:
        options = setup.options
        if options.audio_decoder or options.audio_decoder_weights or options.audio_decoder_config:
            raise ConfigError("The embedded voice has its own audio decoder, which has no options.")
        refuse_window_options(options)
        self.config = VoiceConfig.read(config)
        self.traits = SpeechTraits(
            causal_prompts=False, ids_per_step=self.config.acoustic.max_advance
        )
        codec, max_length = self.config.codec, min(setup.max_length or MAX_LENGTH, MAX_LENGTH)
        super().__init__(
            setup,
            decoder_config(self.config, max_length),
            num_codebooks=codec.num_codebooks,
            num_logits=codec.num_levels,
        )

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Peak memory of a step; input and output layers run in float32."""
        acoustic, codec = self.config.acoustic, self.config.codec
        width = acoustic.num_symbols_before + 1 + acoustic.num_symbols_after
        num_values = position_values(self._decoder) + width * (acoustic.symbol_dim + 2)
        num_values += self.max_length * 2
        scores = num_rows * codec.num_codebooks * codec.num_levels
        return num_tokens * num_values * 4 + LOGIT_BYTES * scores

    def construct(self, device: torch.device) -> AcousticModel:
        """Construct the model with uninitialized parameters."""
        return AcousticModel(
            self.config,
            num_slots=self._setup.max_batch_size,
            max_length=self.max_length,
            dtype=self._setup.dtype,
            device=device,
        )

    def targets(self, model: AcousticModel, names: Collection[str] = ()) -> Iterable[Target]:
        """Every tensor has one name."""
        return model.targets(self._setup.encoding)

    def is_unused(self, name: str) -> bool:
        """Whether a tensor is the codec's, which is loaded separately."""
        return name.startswith(CODEC_PREFIX)

    def codec_bytes(self) -> int:
        """Bytes of the codec's weights, float32 except for the pitch."""
        return sum(tensor.nbytes for tensor in self._codec("meta").parameters())

    def codec_state_bytes(self, num_rows: int) -> int:
        """Bytes of the state of `num_rows` streams in the codec.

        Computed on the CPU: the codec is small, and torch's meta device imports its compiler.
        """
        return state_bytes(adapter(self._codec("cpu")), num_rows)

    def open_codec(self, *, num_rows: int, report: Callable[[float], None]) -> SpeechCodec:
        """Load the codec, and check that streaming equals decoding at once."""
        codec = self._codec(self._setup.device)
        with Checkpoint.open(self._setup.folder) as checkpoint:
            load_tensors(
                checkpoint,
                [
                    TensorTarget(CODEC_PREFIX + name, tensor)
                    for name, tensor in codec.state_dict().items()
                ],
                ignored=lambda name: name.startswith(ACOUSTIC_PREFIX),
                report=report,
            )
        pack_linears(codec, self._setup.native)
        return SpeechCodec(
            decoder=voice_decoder(codec, num_rows=num_rows), codebook_size=self.num_logits
        )

    def _codec(self, device: torch.device | str) -> VoiceCodec:
        """The codec with uninitialized parameters."""
        with torch.device(device):
            return VoiceCodec(self.config.codec).prepare().requires_grad_(False)

    def voice_prompt(self, clip: VoiceClip, codes_QF: Codes) -> VoicePrompt:
        """Refuse: the model has a single voice."""
        raise UnsupportedOption("The embedded voice cannot imitate recordings.", param="voice")
