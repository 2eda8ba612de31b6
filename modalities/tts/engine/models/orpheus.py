"""Orpheus: a Llama that generates SNAC codes as tokens, seven per frame.

Implements `modalities.tts.engine.models.blueprint.SpeechBlueprint`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from triptych.core.errors import InvalidRequest
from triptych.core.runtime.decoders.native import NativeBlueprint
from triptych.modalities.tts.configs.orpheus import CODES_PER_FRAME, FRAME_ORDER, read_speech_block
from triptych.modalities.tts.engine.codecs.loading import HubCodec
from triptych.modalities.tts.engine.codecs.protocol import SpeechCodec
from triptych.modalities.tts.engine.models.blueprint import (
    Codes,
    SpeechBlueprint,
    SpeechSetup,
    SpeechTraits,
)
from triptych.modalities.tts.plan import VoicePrompt
from triptych.modalities.tts.wire import VoiceClip


class OrpheusBlueprint(NativeBlueprint, SpeechBlueprint):
    """A Llama checkpoint with a `speech` block and SNAC in a subfolder."""

    def __init__(self, config: Mapping[str, Any], setup: SpeechSetup) -> None:
        super().__init__(
            config,
            max_length=setup.max_length,
            dtype=setup.dtype,
            device=setup.device,
            native=setup.native,
            encoding=setup.encoding,
        )
        self._block = read_speech_block(config)
        self._codec = HubCodec(setup.folder / self._block.codec, setup.options, native=setup.native)
        self.num_logits = self.vocab_size
        self.traits = SpeechTraits(
            steps_per_frame=CODES_PER_FRAME,
            stop_ids=self._block.stop_ids,
            voices={name: VoicePrompt() for name in self._block.voices},
        )

    def codec_bytes(self) -> int:
        """Bytes of SNAC's weights."""
        return self._codec.num_bytes()

    def codec_state_bytes(self, num_rows: int) -> int:
        """Bytes of the state of `num_rows` streams in SNAC."""
        return self._codec.state_bytes(num_rows)

    def encode_bytes(self) -> int:
        """None: the released models only have built-in voices."""
        return 0

    def open_codec(self, *, num_rows: int, report: Callable[[float], None]) -> SpeechCodec:
        """Load the SNAC codec."""
        return self._codec.open(
            self.device, report, num_rows=num_rows, num_codebooks=CODES_PER_FRAME
        )

    def frames(self, steps_NK: Codes) -> Codes:
        """Seven tokens per frame. A token at the wrong place is mapped to that place's range."""
        num_frames = len(steps_NK) // CODES_PER_FRAME
        ids_F7 = steps_NK[: num_frames * CODES_PER_FRAME].reshape(num_frames, CODES_PER_FRAME)
        codes_F7 = (ids_F7 - self._block.first_code_id) % self._block.codebook_size
        return np.ascontiguousarray(codes_F7[:, FRAME_ORDER].T)

    def voice_prompt(self, clip: VoiceClip, codes_QF: Codes) -> VoicePrompt:
        """Refuse: the released models only have built-in voices."""
        raise InvalidRequest("This model cannot imitate recordings.", param="voice")
