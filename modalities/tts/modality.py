"""Speech: models that speak texts.

Owns how such a model is recognised and who opens its halves. Loads neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.core.command import Command
from triptych.modalities.modality import Modality

PHONEME_TYPES = frozenset({"kokoro", "triptych_voice"})
PROMPT_TYPES = frozenset({"csm", "higgs_audio_v2"})


def _matches(folder: Path, config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in PHONEME_TYPES | PROMPT_TYPES or "speech" in config


_HERE = "triptych.modalities.tts"
_COMMANDS = (
    Command(
        "speak",
        "Speak a text, to a file or as it is made.",
        f"{_HERE}.api.cli",
        (
            'triptych speak "Good morning." -o morning.wav',
            "triptych speak --voice af_bella --speed 1.2 -o chapter.mp3 < chapter.txt",
            'triptych speak "It is played while it is made." --format wav | aplay',
        ),
        operands="[TEXT]",
        is_named=True,
    ),
    Command(
        "voices",
        "List, add and delete voices.",
        f"{_HERE}.api.voices.cli",
        (
            "triptych voices",
            'triptych voices add "My voice" --audio me.wav --consent "I agree." --model csm',
        ),
        operands="[list|add|delete] [VOICE ...]",
        is_named=True,
    ),
)

SPEECH = Modality(
    role="speech",
    task=("speech", "speaks", "/v1/audio/speech"),
    matches=_matches,
    wire=(f"{_HERE}.wire:SpeechRequest", f"{_HERE}.wire:SpeechDelta"),
    api=f"{_HERE}.api.open:open_api",
    engine=f"{_HERE}.engine.loader:open_speech_loader",
    default="triptych-voice",
    sources=(
        f"{_HERE}.sources.kokoro:KOKORO",
        f"{_HERE}.sources.voice:EMBEDDED_VOICE",
    ),
    decoders=("triptych.core.media.audio.decode",),
    pipelines={"SpeechPipeline": f"{_HERE}.api.pipeline"},
    commands=_COMMANDS,
)
