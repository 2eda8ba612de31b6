"""Fakes of the way from text to sound: a front end that spells, and an engine that hums."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import FastAPI

from support.scripted_engine import ScriptedEngine
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.streams import JobStream
from triptych.core.errors import InvalidRequest
from triptych.core.http.app import create_app
from triptych.core.options.config import Config, ScheduleOptions, ServerOptions
from triptych.modalities.tts.api.frontend.base import FrontEnd, PlannedSegment, Voice
from triptych.modalities.tts.api.routes import speech_router
from triptych.modalities.tts.api.service import SpeechService
from triptych.modalities.tts.api.text.chunks import Utterance, split_utterances
from triptych.modalities.tts.api.text.normalize import Normalizer
from triptych.modalities.tts.api.text.spoken import Boundary, Span, SpokenText
from triptych.modalities.tts.api.text.tongues import Reading
from triptych.modalities.tts.api.timing import WordIds
from triptych.modalities.tts.wire import (
    SpeechDelta,
    SpeechFinish,
    SpeechRequest,
    SpeechSegment,
    VoiceClip,
)
from triptych.schedulers.admission import Admission

RATE = 24_000
SAMPLES_PER_ID = 1200
"""50 ms of sound for a letter."""
TONE_HZ = 300.0


@dataclass
class SpellingFrontEnd:
    """Says ASCII letters, sentence by sentence; every other letter has no sound."""

    name: str = "hum"
    sample_rate: int = RATE
    voices: Sequence[Voice] = (Voice(name="ada", language="en-US"), Voice(name="bob"))
    default_voice: str = "ada"
    foreign_voice: str = "nova"
    """A voice of another server, for which the default speaks."""
    can_clone: bool = False
    takes_instructions: bool = False
    takes_speed: bool = False
    has_word_times: bool = True
    word_lag_s: float = 0.0
    tags: tuple[str, ...] = ()
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.7))
    most: int = 60
    pause_s: float = 0.0
    planned: list[tuple[str, str, str, str]] = field(default_factory=list)
    is_done: threading.Event = field(default_factory=threading.Event)
    """Whether a text has been planned to its end."""

    def replaces(self, voice: str) -> bool:
        return voice == self.foreign_voice

    def rest_s(self, boundary: Boundary) -> float:
        return self.pause_s

    def check_voice(self, voice: str) -> str:
        if self.replaces(voice):
            return self.default_voice
        if voice.lower() not in {known.name for known in self.voices}:
            raise InvalidRequest("There are the voices ada and bob.", param="voice")
        return voice.lower()

    def check_language(self, language: str, voice: str) -> None:
        FrontEnd.check_language(self, language, voice)  # type: ignore[arg-type]

    def reading(self, language: str, voice: str, text: str = "") -> Reading | None:
        return FrontEnd.reading(self, language, voice, text)  # type: ignore[arg-type]

    def clip_ids(self, transcript: str) -> tuple[int, ...]:
        return ()

    def plan(
        self, spoken: SpokenText, *, voice: str, instructions: str, language: str = ""
    ) -> Iterator[PlannedSegment]:
        self.planned.append((spoken.text, voice, instructions, language))
        for utterance in split_utterances(spoken, self.most):
            text = utterance.text
            ids = tuple(ord(char) for char in text if char.isalpha() and char.isascii())
            lost = [at for at, char in enumerate(text) if char.isalpha() and not char.isascii()]
            yield PlannedSegment(
                segment=SpeechSegment(
                    prompt_ids=ids, max_steps=2 * len(ids), pause_s=self.pause_s if ids else 0.0
                ),
                utterance=utterance,
                unspoken=tuple(Span(at, at + 1) for at in lost),
                words=tuple(_words(utterance)),
            )
        self.is_done.set()


def _words(utterance: Utterance) -> Iterator[WordIds]:
    """The words with their letters that are ids."""
    num_ids = 0
    for match in re.finditer(r"\S+", utterance.text):
        start = num_ids
        num_ids += sum(char.isalpha() and char.isascii() for char in match[0])
        if num_ids > start:
            yield WordIds(utterance.spoken.source_of(Span(*match.span())), start, num_ids)


@dataclass(kw_only=True)
class FakeSpeechEngine(ScriptedEngine):
    """An engine client: every segment hums one tone on, in steps of `step_samples`.

    The tone goes on from job to job of a call, so that a seam would show. `error` ends a job
    after `num_good` steps, `finish` is why the segments end; jobs wait for `gate` before each step,
    and `step_s` besides. Remembers what became of every job.
    """

    high_water: int = 32
    low_water: int = 8
    num_good: int = 0
    step_samples: int = 1920
    step_s: float = 0.0
    is_endless: bool = False
    finish: SpeechFinish = "stop"
    gate: threading.Event | None = None
    paused: list[tuple[str, bool]] = field(default_factory=list)
    num_steps: int = 0
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._positions: Counter[str] = Counter()
        self._held: set[str] = set()

    def submit(
        self,
        model: str,
        request: Any,
        *,
        job_id: str,
        deadline_s: float | None = None,
        client: str = "",
    ) -> JobStream:
        self.events.append(f"submit {job_id.rpartition('.')[2]}")
        return super().submit(model, request, job_id=job_id, deadline_s=deadline_s)

    async def act(self, job_id: str, request: SpeechRequest) -> None:
        num_prompt = num_out = 0
        for index, segment in enumerate(request.segments):
            left = len(segment.prompt_ids) * SAMPLES_PER_ID
            num_prompt += len(segment.prompt_ids)
            num_said = 0
            while left > 0 or self.is_endless:
                await self._turn(job_id, num_out)
                size = self.step_samples if self.is_endless else min(self.step_samples, left)
                left -= size
                num_out += 1
                is_end = left <= 0 and not self.is_endless
                last = is_end and index == len(request.segments) - 1
                pause = round(segment.pause_s * RATE) if is_end else 0
                num_before, num_said = (
                    num_said,
                    len(segment.prompt_ids) - 1 - left // SAMPLES_PER_ID,
                )
                delta = SpeechDelta(
                    segment=index,
                    pcm=self._tone(job_id, size) + bytes(4 * pause),
                    id_ends_s=tuple(
                        (at + 1) * SAMPLES_PER_ID / RATE for at in range(num_before, num_said)
                    ),
                    segment_finish=self.finish if is_end else None,
                    finish_reason=self.finish if last else None,
                    num_prompt_tokens=num_prompt,
                    num_output_tokens=num_out,
                )
                self.events.append(f"step {job_id.rpartition('.')[2]}")
                self.send(job_id, delta, is_final=last)

    async def _turn(self, job_id: str, num_out: int) -> None:
        is_shut = lambda: self.gate is not None and not self.gate.is_set()  # noqa: E731
        while job_id in self._held or is_shut():  # noqa: ASYNC110 - the gate is another thread's
            await asyncio.sleep(0.002)
        await asyncio.sleep(self.step_s)
        if self.error is not None and num_out >= self.num_good:
            raise self.error
        self.num_steps += 1

    def _tone(self, job_id: str, size: int) -> bytes:
        call = job_id.rpartition(".")[0]
        t_S = (self._positions[call] + np.arange(size)) / RATE
        self._positions[call] += size
        return (0.5 * np.sin(2 * np.pi * TONE_HZ * t_S)).astype("<f4").tobytes()

    def _pause(self, job_ids: Sequence[str], is_paused: bool) -> None:
        for job_id in job_ids:
            self.paused.append((job_id, is_paused))
            (self._held.add if is_paused else self._held.discard)(job_id)


@dataclass
class OneVoice:
    """One voice, which one owner has for one model."""

    voice_id: str = "voice_" + 32 * "a"
    owner: str = ""
    model: str = "hum"

    def clip(self, voice_id: str, owner: str, model: str) -> VoiceClip | None:
        if (voice_id, owner) != (self.voice_id, self.owner):
            return None
        if model != self.model:
            raise InvalidRequest(f"That voice was made for {self.model}.", param="voice")
        return VoiceClip(digest="00", pcm=b"\0" * 400, sample_rate=RATE)


def make_speech_service(
    engine: FakeSpeechEngine,
    front: SpellingFrontEnd | None = None,
    *,
    max_characters: int = 4096,
    voices: OneVoice | None = None,
    default_seed: int | None = None,
    **schedule: int,
) -> SpeechService:
    """A speech service in front of `engine`."""
    return SpeechService(
        engine,
        [front or SpellingFrontEnd()],
        Admission(options=ScheduleOptions(**schedule)),
        max_characters=max_characters,
        find_clip=None if voices is None else voices.clip,
        default_seed=default_seed,
    )


def make_speech_app(
    engine: FakeSpeechEngine, service: SpeechService | None = None, **server: Any
) -> FastAPI:
    """The app in front of `engine`, with the routes of speech alone."""
    router = speech_router(service or make_speech_service(engine))
    return create_app(Config(server=ServerOptions(**server)), engine, [router])


def speech(text: str = "Hello there.", **fields: Any) -> dict[str, Any]:
    """The body of a speech request."""
    return {"model": "hum", "input": text, "voice": "ada", **fields}


def num_samples(text: str) -> int:
    """How long the engine hums for `text`."""
    return SAMPLES_PER_ID * sum(char.isalpha() and char.isascii() for char in text)


def tone(num: int, rate: int = RATE) -> np.ndarray:
    """What the engine hums, at any rate."""
    return 0.5 * np.sin(2 * np.pi * TONE_HZ * np.arange(num) / rate)


def heard(text: str, most: int = SpellingFrontEnd.most) -> np.ndarray:
    """What a listener gets for `text`: the tone, each utterance of it faded in over 5 ms."""
    sizes = [num_samples(part.text) for part in split_utterances(Normalizer()(text), most)]
    pcm_S, start = tone(sum(sizes)), 0
    for size in filter(None, sizes):
        pcm_S[start : start + 120] *= (1 - np.cos(np.pi * np.arange(120) / 120)) / 2
        start += size
    return pcm_S
