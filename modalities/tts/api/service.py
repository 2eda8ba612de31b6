"""The speech service: text in, sound out, for HTTP routes and the Python pipeline.

Owns a call's way from text to a stream of samples: checks, admission, normalization, one engine job
after another, speed, and the coverage of the text. Knows nothing of HTTP, files or torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
from msgspec.structs import replace

from triptych.core.engine_api.caller import Caller
from triptych.core.engine_api.client import EngineClient, OutputStream
from triptych.core.errors import InvalidRequest, NotFound, UnsupportedOption
from triptych.core.limits import MAX_SAMPLES, MAX_SEED
from triptych.core.media.audio.fade import FadeIn
from triptych.core.media.audio.resampling import Pcm
from triptych.core.media.audio.speed import TimeStretch
from triptych.modalities.service import ModelService
from triptych.modalities.tts.api.frontend.base import FrontEnd, PlannedSegment
from triptych.modalities.tts.api.planner import SpeechPart, SpeechPlanner
from triptych.modalities.tts.api.progress import SpeechProgress
from triptych.modalities.tts.api.results import InputFormat, SpeechPiece, SpeechStream
from triptych.modalities.tts.api.ssml.speaking import speak_ssml
from triptych.modalities.tts.api.text.clean import Emoji
from triptych.modalities.tts.api.text.guard import (
    LETTERS_PER_S,
    check_spoken,
    check_text,
    estimate_seconds,
)
from triptych.modalities.tts.api.text.normalize import NormalizeOptions, Normalizer
from triptych.modalities.tts.api.text.tongues import is_english
from triptych.modalities.tts.api.voices.record import is_voice_id
from triptych.modalities.tts.wire import SAMPLE_BYTES, SpeechDelta, SpeechRequest, VoiceClip
from triptych.schedulers.admission import Admission

MIN_SPEED, MAX_SPEED = 0.25, 4.0
TOKENS_PER_S = 25
"""Tokens per second of speech, for the limits on admitted tokens."""
_SILENCE: Pcm = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechCall:
    """One text to be spoken: words, or with the `input_format` "ssml" a document.

    `voice` is a name the model knows (empty: its default), or the id of a voice that the caller
    made. `dialect`, `acronyms` and `emoji` say how the text is read. Without a `dialect`, the
    language's or the voice's applies; without a `seed`, a random one. `is_live`: the sound is
    played while it is generated, after sound that is played until `queued_until_s`
    (`time.monotonic`). `has_word_times`: a model that does not know them is refused.
    `is_admitted`: see `SpeechService.admitted`.
    """

    model: str
    text: str
    input_format: InputFormat = "text"
    voice: str = ""
    speed: float = 1.0
    instructions: str = ""
    language: str = ""
    dialect: Literal["us", "uk"] | None = None
    acronyms: Literal["spell", "keep"] = "spell"
    emoji: Emoji = "drop"
    seed: int | None = None
    is_live: bool = True
    queued_until_s: float = 0.0
    has_word_times: bool = False
    is_admitted: bool = False
    caller: Caller = field(default_factory=Caller)


FindClip: TypeAlias = Callable[[str, str, str], VoiceClip | None]
"""Finds the clip to imitate, from a voice id, its owner and the model. May block.

Returns `None` where the owner has no such voice. Raises `InvalidRequest` where the voice was made
for another model.
"""


class SpeechService(ModelService[FrontEnd]):
    """Serves speech from an engine client."""

    kind = "speech model"

    def __init__(
        self,
        client: EngineClient,
        front_ends: Sequence[FrontEnd],
        admission: Admission,
        *,
        max_characters: int,
        find_clip: FindClip | None = None,
        default_seed: int | None = None,
    ) -> None:
        super().__init__(client, front_ends, admission, default_seed=default_seed)
        self.max_characters = max_characters
        self._find_clip = find_clip
        self._normalizers: dict[NormalizeOptions, Normalizer] = {}

    def speak(self, call: SpeechCall) -> SpeechStream:
        """Speak a call. Every check that needs no engine runs first.

        Raises errors of `core.errors.RequestError` here or from the first piece, which may also
        raise those of `core.errors.Unavailable`.
        """
        check_text(call.text, math.inf if call.is_admitted else self.max_characters)
        if call.input_format == "ssml":
            return speak_ssml(self, dataclasses.replace(call, seed=self._seed(call.seed)))
        return self.speak_planned(call, self.plan(call))

    def plan(self, call: SpeechCall) -> SpeechPlanner:
        """The plan of a call's words, which begins when it is opened. Raises `RequestError`s."""
        front, voice = self.check(call)
        return SpeechPlanner(partial(self._plan, call, front, voice))

    def speak_planned(self, call: SpeechCall, planner: SpeechPlanner) -> SpeechStream:
        """Speak a call with its plan. Raises as `speak` does."""
        front, voice = self.check(call)
        pieces = self._pieces(call, front, voice, planner)
        return SpeechStream(front.sample_rate, pieces, planner.coverage)

    def check(self, call: SpeechCall) -> tuple[FrontEnd, str]:
        """The model and the canonical voice of a call. Raises `RequestError`s, not for its text."""
        front = self.model(call.model)
        return front, _check(call, front)

    async def check_clip(self, call: SpeechCall) -> None:
        """Raise `NotFound` if a call names a custom voice that its caller lacks."""
        await self._clip(call)

    @contextmanager
    def admitted(self, call: SpeechCall, num_characters: int) -> Iterator[SpeechCall]:
        """Admit the pieces of one text, spoken one after another, as a single job.

        Each has at most `num_characters`. Yields the call of which theirs are made: with its seed.
        """
        self.check(call)
        with self._admit(call, num_characters / LETTERS_PER_S):
            yield dataclasses.replace(call, seed=self._seed(call.seed), is_admitted=True)

    def _admit(self, call: SpeechCall, seconds: float) -> AbstractContextManager[object]:
        if call.is_admitted:
            return nullcontext()
        num_tokens = math.ceil(seconds / call.speed * TOKENS_PER_S)
        key = call.caller.principal.key
        return self._admission.admit(key=key, num_jobs=1, num_tokens=num_tokens)

    async def _pieces(
        self, call: SpeechCall, front: FrontEnd, voice: str, planner: SpeechPlanner
    ) -> AsyncGenerator[SpeechPiece, None]:
        speed, rate = (call.speed, 1.0) if front.takes_speed else (1.0, call.speed)
        progress = SpeechProgress(
            call.text, front.sample_rate, speed, rate, word_lag_s=front.word_lag_s
        )
        fade = FadeIn(front.sample_rate)
        stretch = TimeStretch(rate, front.sample_rate) if rate != 1.0 else None
        with self._admit(call, estimate_seconds(call.text)):
            request = await self._request(call, front, voice, speed)
            ends_s = call.queued_until_s  # when playback of the pieces sent so far ends

            def submit(index: int, part: SpeechPart) -> OutputStream:
                lead_s = max(0.0, ends_s - time.monotonic())
                return self._submit(call, replace(request, lead_s=lead_s), index, part)

            async with planner, aclosing(_in_order(planner, submit)) as deltas:
                async for part, delta in deltas:
                    progress.take(part, delta)
                    seconds = len(delta.pcm) / SAMPLE_BYTES / front.sample_rate / rate
                    if seconds:
                        ends_s = max(ends_s, time.monotonic()) + seconds
                    pcm_S = fade.push(np.frombuffer(delta.pcm, "<f4").astype(np.float32))
                    if delta.segment_finish is not None:
                        fade.restart()
                    if stretch is not None:
                        pcm_S = await asyncio.to_thread(stretch.push, pcm_S)
                    if len(pcm_S):
                        yield progress.piece(pcm_S)
                tail_S = _SILENCE if stretch is None else await asyncio.to_thread(stretch.flush)
                yield progress.piece(tail_S, is_last=True)

    async def _request(
        self, call: SpeechCall, front: FrontEnd, voice: str, speed: float
    ) -> SpeechRequest:
        """The request without segments, common to all jobs of a call."""
        return SpeechRequest(
            segments=(),
            sampling=replace(front.sampling, seed=self._seed(call.seed)),
            voice=voice,
            clip=await self._clip(call),
            speed=speed,
            is_live=call.is_live,
            tenant=call.caller.principal.tenant,
        )

    async def _clip(self, call: SpeechCall) -> VoiceClip | None:
        """The caller's custom voice, if the call names one. Raises `NotFound`."""
        if not is_voice_id(call.voice):
            return None
        clip, owner, model = None, call.caller.principal.owner, self.model(call.model).name
        if self._find_clip is not None:
            clip = await asyncio.to_thread(self._find_clip, call.voice, owner, model)
        if clip is None:
            raise NotFound(
                "You have no such voice; GET /v1/audio/voices or `triptych voices` lists yours.",
                param="voice",
            )
        return clip

    def _submit(
        self, call: SpeechCall, request: SpeechRequest, index: int, part: SpeechPart
    ) -> OutputStream:
        segments = tuple(entry.segment for entry in part if not entry.is_silent)
        sampling = replace(request.sampling, sample_index=index % MAX_SAMPLES)
        return self.client.submit(
            call.model,
            replace(request, segments=segments, sampling=sampling),
            job_id=f"{call.caller.call_id}.{index}",
            deadline_s=call.caller.deadline_s,
            client=call.caller.client,
        )

    def _plan(self, call: SpeechCall, front: FrontEnd, voice: str) -> Iterator[PlannedSegment]:
        """Normalize the text and plan its segments. Raises `InvalidRequest` if it has no words."""
        options = NormalizeOptions(
            dialect=call.dialect or front.reading(call.language, voice, call.text),
            acronyms=call.acronyms,
            emoji=call.emoji,
            tags=front.tags,
        )
        if options not in self._normalizers:
            self._normalizers[options] = Normalizer(options)
        spoken = self._normalizers[options](call.text)
        check_spoken(spoken)
        return front.plan(
            spoken, voice=voice, instructions=call.instructions, language=call.language
        )


def _check(call: SpeechCall, front: FrontEnd) -> str:
    """The canonical voice of a call. Raises `RequestError` for unsupported options."""
    if not MIN_SPEED <= call.speed <= MAX_SPEED:
        raise InvalidRequest(f"speed must be between {MIN_SPEED} and {MAX_SPEED}.", param="speed")
    if abs(call.seed or 0) > MAX_SEED:
        raise InvalidRequest(f"seed must be between {-MAX_SEED} and {MAX_SEED}.", param="seed")
    if call.instructions and not front.takes_instructions:
        raise UnsupportedOption(
            f"{front.name} does not support instructions; choose a voice that suits you.",
            param="instructions",
        )
    if call.has_word_times and not front.has_word_times:
        raise UnsupportedOption(
            f"{front.name} does not know when it speaks a word: leave timestamps out, or transcribe"
            " its speech with timestamp_granularities.",
            param="timestamp_granularities",
        )
    voice = ""
    if not is_voice_id(call.voice):
        voice = front.check_voice(call.voice or front.default_voice)
    elif not front.can_clone:
        raise UnsupportedOption(
            f"{front.name} supports built-in voices only: send the name of one.", param="voice"
        )
    _check_language(call, front, voice)
    return voice


def _check_language(call: SpeechCall, front: FrontEnd, voice: str) -> None:
    """Raise `UnsupportedOption` for a language, or an option that is of English alone."""
    front.check_language(call.language, voice)
    given = {"dialect": call.dialect is not None, "emoji": call.emoji == "name"}
    asked = [option for option, is_given in given.items() if is_given]
    if not asked:
        return
    reading = front.reading(call.language, voice, call.text)
    if reading is None and not call.language:
        reading = call.dialect  # which says that the text is English
    if not is_english(reading):
        raise UnsupportedOption(
            f"{asked[0]} is for texts in English: leave it out, or set language to en.",
            param=asked[0],
        )


async def _in_order(
    planner: SpeechPlanner, submit: Callable[[int, SpeechPart], OutputStream]
) -> AsyncGenerator[tuple[SpeechPart, SpeechDelta], None]:
    """The deltas of all parts' jobs, in order. Closing it cancels the jobs.

    The next job is submitted when the current one reaches its last segment: early enough to avoid a
    gap, and late enough that only one job runs ahead of playback.
    """
    jobs: deque[tuple[SpeechPart, OutputStream]] = deque()
    num_submitted = 0

    def begin(part: SpeechPart) -> None:
        nonlocal num_submitted
        jobs.append((part, submit(num_submitted, part)))
        num_submitted += 1

    try:
        while True:
            if not jobs:
                if (first := await planner.next_part()) is None:
                    return
                begin(first)
            part, outputs = jobs[0]
            num_left = sum(not entry.is_silent for entry in part)
            async for output in outputs:
                delta = output.payload
                assert isinstance(delta, SpeechDelta)
                num_left -= delta.segment_finish is not None
                if num_left <= 1 and len(jobs) == 1 and (ahead := planner.next_if_ready()):
                    begin(ahead)
                yield part, delta
            jobs.popleft()
    finally:
        for _, outputs in jobs:
            await outputs.aclose()
