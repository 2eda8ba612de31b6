"""The listening side of a spoken conversation: implements `ports.Hearing`.

Owns the composition of voice activity and the recognition service.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.modalities.asr.api.service import AsrService, TranscribeCall
from triptych.modalities.talk.hearing.live import IncrementalTranscriber
from triptych.modalities.talk.hearing.turns import VoiceTurnDetector
from triptych.modalities.talk.hearing.voice_activity import VoiceNetwork
from triptych.modalities.talk.ports import TurnOptions


@dataclass(frozen=True, slots=True)
class VoiceHearing:
    """Silero's network, shared by all sessions, and the recognizers of a server."""

    recognition: AsrService
    network: VoiceNetwork

    def open_detector(self, options: TurnOptions) -> VoiceTurnDetector:
        """Open a detector. Raises `InvalidRequest` for options out of range."""
        return VoiceTurnDetector(self.network, options)

    def open_transcriber(self, call: TranscribeCall) -> IncrementalTranscriber:
        """Open a transcriber of one turn, on a running loop. Raises `RequestError`s."""
        return IncrementalTranscriber(self.recognition, call, self.network)
