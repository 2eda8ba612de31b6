"""Text in, sound out: what HTTP routes and the Python pipeline share.

Owns the way of a call from text to a stream of samples: checks, admission, reading out, one engine
job after another, speed, the account of what was spoken. Knows nothing of HTTP, files or torch.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, Self

import msgspec
import numpy as np

from triptych.core.client import EngineClient, OutputStream
from triptych.core.config import Config
from triptych.core.errors import InvalidRequest, NotFound, UnknownModel, UnsupportedOption
from triptych.core.limits import MAX_SAMPLES, MAX_SEED
from triptych.core.media.audio.resampling import Pcm
from triptych.core.media.audio.speed import TimeStretch
from triptych.modalities.tts.api.frontend.base import FrontEnd, PlannedSegment
from triptych.modalities.tts.api.planner import SpeechJobPart, SpeechPlanner
from triptych.modalities.tts.api.progress import BYTES_PER_SAMPLE, SpeechPiece, SpeechProgress
from triptych.modalities.tts.api.text.clean import Emoji
from triptych.modalities.tts.api.text.coverage import Coverage
from triptych.modalities.tts.api.text.guard import check_spoken, check_text, estimate_seconds
from triptych.modalities.tts.api.text.normalize import NormalizeOptions, Normalizer
from triptych.modalities.tts.api.voices.record import is_voice_id
from triptych.modalities.tts.scheduling.playback import Playback
from triptych.modalities.tts.wire import SpeechDelta, SpeechRequest, VoiceClip
from triptych.schedulers.admission import Admission

MIN_SPEED, MAX_SPEED = 0.25, 4.0
TOKENS_PER_S = 25
"""What a second of speech counts for in the bounds on admitted tokens."""
_SILENCE: Pcm = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechCall:
    """One text to be spoken.

    `voice` is a name the model knows (empty: its default), or the id of a voice that `owner` made.
    `dialect`, `acronyms` and `emoji` say how the text is read; without a dialect it is that of the
    language, or of the voice. Without a `seed` one is drawn. `tenant` salts caches, `key` pays for
    admission. `is_live`: somebody listens while it is made.
    """

    model: str
    text: str
    call_id: str
    voice: str = ""
    speed: float = 1.0
    instructions: str = ""
    language: str = ""
    dialect: Literal["us", "uk"] | None = None
    acronyms: Literal["spell", "keep"] = "spell"
    emoji: Emoji = "drop"
    seed: int | None = None
    is_live: bool = True
    tenant: str = ""
    key: str = ""
    owner: str = ""
    deadline_s: float | None = None


class VoiceSource(Protocol):
    """Where callers' own voices are kept."""

    def clip(self, voice_id: str, owner: str, model: str) -> VoiceClip | None:
        """What `model` shall imitate; `None` where `owner` has no such voice. May block.

        Raises `InvalidRequest` for a voice that was made for another model.
        """
        ...


class SpeechService:
    """Serves speech from an engine client."""

    def __init__(
        self,
        client: EngineClient,
        front_ends: Sequence[FrontEnd],
        admission: Admission,
        *,
        max_characters: int,
        voices: VoiceSource | None = None,
        default_seed: int | None = None,
    ) -> None:
        self.client = client
        self.front_ends: Mapping[str, FrontEnd] = {front.name: front for front in front_ends}
        self.max_characters = max_characters
        self._admission = admission
        self._voices = voices
        self._default_seed = default_seed
        self._normalizers: dict[NormalizeOptions, Normalizer] = {}

    @classmethod
    def from_config(
        cls,
        config: Config,
        front_ends: Sequence[FrontEnd],
        client: EngineClient,
        *,
        voices: VoiceSource | None = None,
        max_characters: int = 0,
        admission: Admission | None = None,
    ) -> Self:
        """The service with the bounds and the seed of a configuration.

        `max_characters` replaces the longest text of the configuration where it is given. An
        `admission` is shared with other services.
        """
        return cls(
            client,
            front_ends,
            admission or Admission(options=config.schedule),
            max_characters=max_characters or config.speech.max_speech_characters,
            voices=voices,
            default_seed=config.device.seed if config.device.seed >= 0 else None,
        )

    def front_end(self, name: str) -> FrontEnd:
        """The front end of the model called `name`. Raises `UnknownModel`."""
        if name not in self.front_ends:
            raise UnknownModel.among(self.front_ends, name, "speech model")
        return self.front_ends[name]

    def speak(self, call: SpeechCall) -> Speaking:
        """Speak a call. What can be told at once is checked before anything is started.

        Raises errors of `core.errors.RequestError` here or out of the first piece, which may also
        raise those of `core.errors.Unavailable`.
        """
        front = self.front_end(call.model)
        check_text(call.text, max_characters=self.max_characters)
        voice = _check(call, front)
        script = SpeechPlanner(partial(self._write, call, front, voice))
        return Speaking(front.sample_rate, script, self._pieces(call, front, voice, script))

    async def _pieces(
        self, call: SpeechCall, front: FrontEnd, voice: str, script: SpeechPlanner
    ) -> AsyncGenerator[SpeechPiece, None]:
        is_stretched = call.speed != 1.0 and not front.takes_speed
        speed = 1.0 if is_stretched else call.speed
        account = SpeechProgress(front.sample_rate, speed)
        rate = call.speed if is_stretched else 1.0
        stretch = TimeStretch(rate, front.sample_rate) if is_stretched else None
        num_tokens = math.ceil(estimate_seconds(call.text) / call.speed * TOKENS_PER_S)
        with self._admission.admit(key=call.key, num_jobs=1, num_tokens=num_tokens):
            request = await self._request(call, front, voice, speed)
            listener = Playback(time.monotonic())

            def submit(part: SpeechJobPart) -> OutputStream:
                lead_s = listener.lead_s(time.monotonic()) if listener.has_begun else 0.0
                return self._submit(call, request, part, max(0.0, lead_s))

            async with script, aclosing(_in_order(script, submit)) as deltas:
                async for part, delta in deltas:
                    account.take(part, delta)
                    if delta.pcm:
                        seconds = len(delta.pcm) / BYTES_PER_SAMPLE / front.sample_rate / rate
                        listener.give(seconds, time.monotonic())
                    pcm_S = np.frombuffer(delta.pcm, "<f4").astype(np.float32)
                    if stretch is not None:
                        pcm_S = await asyncio.to_thread(stretch.push, pcm_S)
                    if len(pcm_S):
                        yield account.piece(pcm_S)
                tail_S = _SILENCE if stretch is None else await asyncio.to_thread(stretch.flush)
                yield account.piece(tail_S, is_last=True)

    async def _request(
        self, call: SpeechCall, front: FrontEnd, voice: str, speed: float
    ) -> SpeechRequest:
        """What all jobs of a call have in common."""
        seeds = (call.seed, self._default_seed, secrets.randbits(62))
        return SpeechRequest(
            segments=(),
            sampling=msgspec.structs.replace(
                front.sampling, seed=next(seed for seed in seeds if seed is not None)
            ),
            voice=voice,
            clip=await self._clip(call),
            speed=speed,
            is_live=call.is_live,
            tenant=call.tenant,
        )

    async def _clip(self, call: SpeechCall) -> VoiceClip | None:
        """The caller's own voice, if one is asked for. Raises `NotFound`."""
        if not is_voice_id(call.voice):
            return None
        clip = None
        if self._voices is not None:
            find = self._voices.clip
            clip = await asyncio.to_thread(find, call.voice, call.owner, call.model)
        if clip is None:
            raise NotFound(
                "You have no such voice; GET /v1/audio/voices, or `triptych voices`, lists yours.",
                param="voice",
            )
        return clip

    def _submit(
        self, call: SpeechCall, request: SpeechRequest, part: SpeechJobPart, lead_s: float
    ) -> OutputStream:
        sampling = msgspec.structs.replace(request.sampling, sample_index=part.index % MAX_SAMPLES)
        return self.client.submit(
            call.model,
            msgspec.structs.replace(
                request, segments=part.segments, sampling=sampling, lead_s=lead_s
            ),
            job_id=f"{call.call_id}.{part.index}",
            deadline_s=call.deadline_s,
        )

    def _write(self, call: SpeechCall, front: FrontEnd, voice: str) -> Iterator[PlannedSegment]:
        """Read the text out and plan it. Raises `InvalidRequest` where nothing would be heard."""
        spoken = self._normalizer(call, front, voice)(call.text)
        check_spoken(spoken)
        return front.plan(
            spoken, voice=voice, instructions=call.instructions, language=call.language
        )

    def _normalizer(self, call: SpeechCall, front: FrontEnd, voice: str) -> Normalizer:
        own = (known.language for known in front.voices if voice.startswith(known.name))
        language = call.language or next(own, "")  # of a mixture, the first voice's
        options = NormalizeOptions(
            dialect=call.dialect or ("uk" if language.lower() == "en-gb" else "us"),
            acronyms=call.acronyms,
            emoji=call.emoji,
            tags=front.tags,
        )
        if options not in self._normalizers:
            self._normalizers[options] = Normalizer(options)
        return self._normalizers[options]


class Speaking:
    """A call being spoken: its pieces, in order. Nothing happens before the first is asked for."""

    def __init__(
        self, sample_rate: int, script: SpeechPlanner, pieces: AsyncGenerator[SpeechPiece, None]
    ) -> None:
        self.sample_rate = sample_rate
        self._script = script
        self._pieces = pieces

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SpeechPiece:
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """Speak no further: what runs is cancelled."""
        await self._pieces.aclose()

    async def speakable(self) -> Coverage:
        """What of the text has sounds at all. May be asked from the first piece on."""
        return await self._script.whole()


def _check(call: SpeechCall, front: FrontEnd) -> str:
    """The canonical voice of a call. Raises for what the model cannot do."""
    if not MIN_SPEED <= call.speed <= MAX_SPEED:
        raise InvalidRequest(f"speed must be between {MIN_SPEED} and {MAX_SPEED}.", param="speed")
    if abs(call.seed or 0) > MAX_SEED:
        raise InvalidRequest(f"seed must be between {-MAX_SEED} and {MAX_SEED}.", param="seed")
    if call.instructions and not front.takes_instructions:
        raise UnsupportedOption(
            f"{front.name} takes no instructions: choose a voice that speaks the way you want.",
            param="instructions",
        )
    if call.language.lower().partition("-")[0] not in ("", "en"):
        raise UnsupportedOption(
            "Text is read out as English only: send en, en-US or en-GB, or leave it out.",
            param="language",
        )
    if not is_voice_id(call.voice):
        return front.check_voice(call.voice or front.default_voice)
    if not front.can_clone:
        raise UnsupportedOption(
            f"{front.name} speaks with its own voices only: send the name of one.", param="voice"
        )
    return ""


async def _in_order(
    script: SpeechPlanner, submit: Callable[[SpeechJobPart], OutputStream]
) -> AsyncGenerator[tuple[SpeechJobPart, SpeechDelta], None]:
    """What the jobs of all parts say, one after another; closing this cancels them.

    A job is submitted when the one before it comes to its last segment: early enough that no gap
    arises, and so late that only one job at a time runs ahead of its listener.
    """
    jobs: deque[tuple[SpeechJobPart, OutputStream]] = deque()
    try:
        while True:
            if not jobs:
                if (first := await script.next_part()) is None:
                    return
                jobs.append((first, submit(first)))
            part, outputs = jobs[0]
            num_left = len(part.segments)
            async for output in outputs:
                delta = output.payload
                assert isinstance(delta, SpeechDelta)
                num_left -= delta.segment_finish is not None
                if num_left <= 1 and len(jobs) == 1 and (ahead := script.next_if_ready()):
                    jobs.append((ahead, submit(ahead)))
                yield part, delta
            jobs.popleft()
    finally:
        for _, outputs in jobs:
            await outputs.aclose()
