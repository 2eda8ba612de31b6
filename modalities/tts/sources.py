"""The speech models that come under names of their own, and which of them speaks unless told.

Owns the table. Loads no torch.
"""

from __future__ import annotations

from triptych.core.weights.resolve import Source
from triptych.modalities.tts.models.kokoro.source import KOKORO
from triptych.modalities.tts.models.voice.source import EMBEDDED_VOICE

SPEECH_SOURCES: tuple[Source, ...] = (KOKORO, EMBEDDED_VOICE)
DEFAULT_SPEECH = EMBEDDED_VOICE.name
"""What is served, and what "embedded" stands for, where no model is named."""
