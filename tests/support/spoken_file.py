"""A microphone for Chromium that says a sentence of the embedded voice, again and again."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import httpx

BEFORE_S = 1
AFTER_S = 8
"""Silence before it is said again."""


def microphone_of(url: str, text: str, folder: Path) -> str:
    """Return the flag of Chromium. The server at `url` speaks, `folder` keeps the sound."""
    body = {"model": "triptych-voice", "input": text, "response_format": "wav"}
    spoken = httpx.post(f"{url}/v1/audio/speech", json=body, timeout=60).raise_for_status()
    with wave.open(io.BytesIO(spoken.content)) as sound:
        rate, frames = sound.getframerate(), sound.readframes(sound.getnframes())
    path = folder / "microphone.wav"
    with wave.open(str(path), "wb") as recording:
        recording.setparams((1, 2, rate, 0, "NONE", ""))
        recording.writeframes(bytes(2 * rate * BEFORE_S) + frames + bytes(2 * rate * AFTER_S))
    return f"--use-file-for-fake-audio-capture={path}"
