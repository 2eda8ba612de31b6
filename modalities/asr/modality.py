"""The ASR modality: models that transcribe speech.

Owns recognizing such a model, and the entry points of its API and engine. Loads neither.
"""

from __future__ import annotations

from triptych.core.options.command import Command
from triptych.modalities.asr.families import recognizes_speech
from triptych.modalities.modality import Modality

_HERE = "triptych.modalities.asr"
_COMMANDS = (
    Command(
        "transcribe",
        "Transcribe audio files.",
        f"{_HERE}.api.cli",
        (
            "triptych transcribe talk.mp3",
            "triptych transcribe interview.wav --format srt -o interview.srt",
        ),
        operands="FILE ...",
        is_named=True,
    ),
)

ASR = Modality(
    role="asr",
    task=("transcription", "writes down what it hears", "/v1/audio/transcriptions"),
    matches=lambda _, config: recognizes_speech(config),
    wire=(f"{_HERE}.wire:TranscribeRequest", f"{_HERE}.wire:TranscribeDelta"),
    api=f"{_HERE}.api.routes:open_api",
    engine=f"{_HERE}.engine.loader:AsrLoader",
    default="whisper-tiny.en",
    sources=(f"{_HERE}.source:WHISPER_TINY", f"{_HERE}.source:WHISPER_BASE"),
    decoders=("triptych.core.media.audio.decode",),
    pipelines={"TranscriptionPipeline": f"{_HERE}.api.pipeline"},
    commands=_COMMANDS,
)
