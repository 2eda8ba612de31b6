"""Speech: models that speak texts.

Owns how such a model is recognized and which functions open its halves. Loads neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.core.errors import WeightsError
from triptych.core.options.command import Command
from triptych.modalities.modality import Modality

_HERE = "triptych.modalities.tts"
_FRONT = f"{_HERE}.api.frontend"
_MODELS = f"{_HERE}.engine.models"


@dataclass(frozen=True, slots=True)
class SpeechFamily:
    """The entry points of a family: the front end's, and a blueprint's or a loader's."""

    front_end: str
    engine: str


_PHONEMES = f"{_FRONT}.phoneme:open_phoneme_model"
FAMILIES: Mapping[str, SpeechFamily] = {
    "csm": SpeechFamily(f"{_FRONT}.prompt:open_csm", f"{_MODELS}.csm:CsmBlueprint"),
    "higgs_audio_v2": SpeechFamily(
        f"{_FRONT}.prompt:open_higgs", f"{_MODELS}.higgs:HiggsBlueprint"
    ),
    "kokoro": SpeechFamily(_PHONEMES, f"{_MODELS}.kokoro.loader:KokoroLoader"),
    "qwen3_tts": SpeechFamily(
        f"{_FRONT}.qwen:open_qwen_tts", f"{_MODELS}.qwen3_tts:QwenTtsBlueprint"
    ),
    "triptych_voice": SpeechFamily(_PHONEMES, f"{_MODELS}.voice.blueprint:VoiceBlueprint"),
}
"""Families by their `model_type`."""
ORPHEUS = SpeechFamily(f"{_FRONT}.prompt:open_orpheus", f"{_MODELS}.orpheus:OrpheusBlueprint")
"""The family of Llamas whose config.json has a `speech` block."""


def family_of(config: Mapping[str, Any]) -> SpeechFamily:
    """The family of a model. Raises `WeightsError` that lists the known families."""
    model_type = config.get("model_type")
    if family := FAMILIES.get(str(model_type)):
        return family
    if "speech" in config:
        return ORPHEUS
    raise WeightsError(
        f"model_type {model_type!r} is not a known speech model type:"
        f" {', '.join(FAMILIES)}, or a Llama with a speech block."
    )


_COMMANDS = (
    Command(
        "speak",
        "Speak a text, to a file or as a stream.",
        f"{_HERE}.api.cli",
        (
            'triptych speak "Good morning." -o morning.wav',
            "triptych speak --voice af_bella --speed 1.2 -o chapter.mp3 < chapter.txt",
            'triptych speak "Playback starts at once." --format wav | aplay',
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
    matches=lambda _, config: str(config.get("model_type")) in FAMILIES or "speech" in config,
    wire=(f"{_HERE}.wire:SpeechRequest", f"{_HERE}.wire:SpeechDelta"),
    api=f"{_HERE}.api.routes:open_api",
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
