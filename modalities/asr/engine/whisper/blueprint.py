"""The blueprint of Whisper.

Owns the order of loading, and the memory bound of a running recording.
"""

from __future__ import annotations

from collections.abc import Callable

from triptych.core.text.tokenizer import read_tokenizer
from triptych.modalities.asr.engine.blueprint import BlueprintSetup
from triptych.modalities.asr.engine.whisper.model import WhisperNetwork
from triptych.modalities.asr.engine.whisper.recognizer import SpeechRecognizer
from triptych.modalities.asr.spec import FRAMES_PER_S, MAX_PART_S, SAMPLE_RATE, WhisperSpec

_FLOAT_BYTES = 4


class WhisperBlueprint:
    """A Whisper of which no weights are read yet: an `engine.blueprint.RecognizerBlueprint`."""

    def __init__(self, setup: BlueprintSetup) -> None:
        self._setup = setup
        self._spec = WhisperSpec.read(setup.checkpoint.folder)

    def weight_bytes(self) -> int:
        """Bytes that the weights take."""
        return WhisperNetwork.weight_bytes(self._setup.checkpoint, self._setup.dtype)

    def recording_bytes(self) -> int:
        """The most bytes of a recording: its spectrogram, a window's caches and layers."""
        sizes = self._spec.config
        sound = MAX_PART_S * (SAMPLE_RATE + 2 * FRAMES_PER_S * sizes.num_mel_bins) * _FLOAT_BYTES
        num_kept = sizes.max_source_positions + sizes.max_target_positions
        caches = 2 * sizes.decoder_layers * num_kept * sizes.d_model
        layer = sizes.max_source_positions * (4 * sizes.d_model + 2 * sizes.encoder_ffn_dim)
        item_bytes = self._setup.dtype.itemsize
        return sound + (caches + layer) * item_bytes + 4 * sizes.vocab_size * _FLOAT_BYTES

    def build(self, report: Callable[[float], None]) -> SpeechRecognizer:
        """Load the weights."""
        setup = self._setup
        network = WhisperNetwork.load(
            setup.checkpoint,
            self._spec,
            dtype=setup.dtype,
            device=setup.device,
            native=setup.native,
            report=report,
        )
        tokenizer = read_tokenizer(setup.checkpoint.folder, setup.name)
        return SpeechRecognizer.of(network, tokenizer)
