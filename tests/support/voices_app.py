"""Front ends of models that need not exist, and an app that lists, makes and removes voices."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from fastapi import FastAPI

from support.http import FakeEngine
from triptych.core.http.app import create_app
from triptych.core.media.child import DecodePool
from triptych.core.options.config import Config, ServerOptions
from triptych.modalities.tts.api.frontend.base import PlannedSegment, Voice
from triptych.modalities.tts.api.text.spoken import SpokenText
from triptych.modalities.tts.api.voices.routes import voices_router
from triptych.modalities.tts.api.voices.service import VoiceService
from triptych.modalities.tts.api.voices.store import VoiceQuota, VoiceStore

DECODE = "triptych.core.media.audio.decode"
RATE = 24_000


@dataclass
class FakeFrontEnd:
    """A front end that plans nothing."""

    name: str
    can_clone: bool = False
    sample_rate: int = RATE
    voices: Sequence[Voice] = ()
    default_voice: str = ""
    takes_instructions: bool = False
    takes_speed: bool = False

    def check_voice(self, voice: str) -> str:
        return voice

    def clip_ids(self, transcript: str) -> tuple[int, ...]:
        return ()

    def plan(
        self, spoken: SpokenText, *, voice: str, instructions: str, language: str = ""
    ) -> Iterator[PlannedSegment]:
        yield from ()


@dataclass
class FakeReader(FakeFrontEnd):
    """A front end that turns transcripts into the codes of their letters."""

    def clip_ids(self, transcript: str) -> tuple[int, ...]:
        return tuple(map(ord, transcript))


SINGER = FakeFrontEnd(
    "singer",
    voices=(Voice(name="alto", language="en-US", description="warm"), Voice(name="bass")),
)
PARROT = FakeReader("parrot", can_clone=True, voices=(Voice(name="polly"),))
MYNAH = FakeFrontEnd("mynah", can_clone=True, sample_rate=16_000)


def make_voice_service(
    folder: Path, pool: DecodePool, *front_ends: FakeFrontEnd, quota: VoiceQuota | None = None
) -> VoiceService:
    """A service in front of `folder`; without front ends, of all three."""
    store = VoiceStore(folder, quota or VoiceQuota(per_owner=3, in_total=5))
    return VoiceService(store, front_ends or (SINGER, PARROT, MYNAH), pool)


def make_voice_app(service: VoiceService, **server: Any) -> FastAPI:
    """The whole app with the routes of the voices alone."""
    config = Config(server=ServerOptions(**server))
    return create_app(config, FakeEngine(), [voices_router(service)])


def recording(seconds: float = 2.0, rate: int = RATE, *, level: float = 0.3) -> bytes:
    """A WAV file of a tone that comes and goes."""
    time_S = np.arange(round(seconds * rate)) / rate
    tone_S = level * np.sin(2 * np.pi * 220 * time_S) * np.sin(2 * np.pi * 3 * time_S)
    file = io.BytesIO()
    soundfile.write(file, tone_S.astype(np.float32), rate, subtype="PCM_16", format="WAV")
    return file.getvalue()
