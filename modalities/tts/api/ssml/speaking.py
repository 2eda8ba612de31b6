"""Speaks a script: one passage after another, with the pauses between them.

Owns the order of the passages and their one account: the times of words, the usage, the coverage.
Each passage is a call of the speech service; which voices and languages there are is the service's.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from triptych.core.errors import RequestError, UnsupportedOption
from triptych.core.media.audio.resampling import Pcm
from triptych.modalities.tts.api.planner import SpeechPlanner
from triptych.modalities.tts.api.results import SpeechPiece, SpeechStream, SpeechUsage, SpokenWord
from triptych.modalities.tts.api.ssml.reader import read_ssml
from triptych.modalities.tts.api.ssml.script import Passage, Script, WordPlaces
from triptych.modalities.tts.api.text.coverage import Coverage
from triptych.modalities.tts.api.text.guard import Unspeakable, estimate_seconds
from triptych.modalities.tts.api.text.tongues import is_english
from triptych.modalities.tts.wire import SpeechFinish

if TYPE_CHECKING:
    from triptych.modalities.tts.api.service import SpeechCall, SpeechService

AHEAD_S = 3.0
"""Seconds of a passage that are left when the next one begins, so that its first sound is ready."""


def speak_ssml(service: SpeechService, call: SpeechCall) -> SpeechStream:
    """The sound of a call whose text is SSML. Raises `RequestError`s with their place in it."""
    service.check(call)
    script = read_ssml(call.text)
    parts = [
        _PassagePart(
            passage, own := _passage_call(service, call, passage, number), service.plan(own)
        )
        for number, passage in enumerate(script.passages)
    ]
    front = service.model(call.model)
    has_other_voice = any(front.replaces(part.call.voice) for part in parts)
    ignored = (*(["voice"] if has_other_voice else []), *script.ignored)
    whole = partial(_coverage, parts)
    return SpeechStream(
        front.sample_rate, _ScriptSpeaking(service, call, script, parts).pieces(), whole, ignored
    )


class _PassagePart(NamedTuple):
    """A passage with the call that speaks it, and the plan of its sound."""

    passage: Passage
    call: SpeechCall
    planner: SpeechPlanner

    @property
    def likely_s(self) -> float:
        """Likely seconds of its sound."""
        return estimate_seconds(self.passage.text) / self.call.speed


class _Begun:
    """The sound of a passage: its first piece is made from now on."""

    def __init__(self, pieces: AsyncGenerator[SpeechPiece, None]) -> None:
        self._pieces = pieces
        self._first = asyncio.ensure_future(anext(pieces))

    async def pieces(self) -> AsyncGenerator[SpeechPiece, None]:
        """All pieces, the first one included."""
        yield await self._first
        async for piece in self._pieces:
            yield piece

    async def aclose(self) -> None:
        """Cancel the passage's jobs."""
        self._first.cancel()
        await asyncio.wait((self._first,))
        if not self._first.cancelled():
            self._first.exception()  # retrieved here, where `pieces` did not raise it
        await self._pieces.aclose()


def _passage_call(
    service: SpeechService, call: SpeechCall, passage: Passage, number: int
) -> SpeechCall:
    """The call that speaks a passage, checked."""
    own = replace(
        call,
        text=passage.text,
        input_format="text",
        voice=passage.delivery.voice or call.voice,
        language=passage.delivery.language or call.language,
        speed=call.speed * passage.delivery.rate,
        is_admitted=True,
        caller=replace(call.caller, call_id=f"{call.caller.call_id}.passage{number}"),
    )
    try:
        front, voice = service.check(own)
        reading = call.dialect or front.reading(own.language, voice, own.text)
        if passage.has_english_words and not is_english(reading):
            raise UnsupportedOption("<say-as> is for texts in English: write the words, or <sub>.")
    except RequestError as error:
        raise type(error)(f"SSML, {passage.place}: {error}", param="input") from error
    return own


async def _coverage(parts: Sequence[_PassagePart]) -> Coverage:
    """The share of all passages that the model has sounds for."""
    whole = Coverage()
    for passage, _, planner in parts:
        try:
            whole.add(await planner.coverage())
        except Unspeakable:
            whole.miss(passage.text)
    return whole


class _ScriptSpeaking:
    """The sound of one script."""

    def __init__(
        self,
        service: SpeechService,
        call: SpeechCall,
        script: Script,
        parts: Sequence[_PassagePart],
    ) -> None:
        self._service = service
        self._call = call
        self._script = script
        self._parts = parts
        self._front = service.model(call.model)
        self._sample_rate = self._front.sample_rate
        self._num_samples = 0
        self._ends_s = call.queued_until_s  # when playback of the pieces sent so far ends
        self._rest_s = 0.0  # the silence before the next sound
        self._last: Passage | None = None  # that had sound
        self._next: _Begun | None = None  # the passage after the one that is spoken
        self._usage = SpeechUsage()
        self._num_letters = self._num_spoken = 0.0
        self._finish: SpeechFinish = "stop"

    async def pieces(self) -> AsyncGenerator[SpeechPiece, None]:
        """The pieces of all passages; a pause comes with the sound after it."""
        error: Unspeakable | None = None
        num_characters = sum(part.passage.num_spoken for part in self._parts)
        with self._service.admitted(self._call, math.ceil(num_characters)):
            async with AsyncExitStack() as planners:
                for call in {part.call.voice: part.call for part in self._parts}.values():
                    await self._service.check_clip(call)
                for part in self._parts:
                    await planners.enter_async_context(part.planner)
                planners.push_async_callback(self._drop_next)
                for part, following in zip_longest(self._parts, self._parts[1:]):
                    try:
                        async with aclosing(self._say(part, following)) as pieces:
                            async for piece in pieces:
                                yield piece
                    except Unspeakable as reason:
                        error = error or reason
                        self._num_letters += part.passage.num_letters
                if self._last is None:
                    assert error is not None, "a script has passages"
                    raise error
                yield self._end()

    def _begin(self, part: _PassagePart, after_s: float) -> _Begun:
        """Begin a passage that is played `after_s` after all that was sent."""
        call = replace(part.call, queued_until_s=self._ends_s + after_s)
        return _Begun(self._service.speak_planned(call, part.planner).pieces)

    async def _drop_next(self) -> None:
        if self._next is not None:
            await self._next.aclose()

    async def _say(
        self, part: _PassagePart, following: _PassagePart | None
    ) -> AsyncGenerator[SpeechPiece, None]:
        """The sound of a passage, after the silence that precedes it; begins `following`."""
        passage = part.passage
        self._rest_s += self._pause_s(passage)
        begun, self._next = self._next or self._begin(part, self._rest_s), None
        before, words, left_s = self._usage, None, part.likely_s
        async with aclosing(begun):
            async for piece in begun.pieces():
                pcm_S = piece.pcm_S
                if words is None:
                    pcm_S = np.concatenate([self._silence(self._rest_s), pcm_S])
                    num_before = self._num_samples + len(pcm_S) - len(piece.pcm_S)
                    words = WordPlaces(passage, num_before / self._sample_rate)
                    self._rest_s = 0.0
                self._usage = before.plus(piece.usage)
                is_last = piece.finish_reason is not None
                if is_last:
                    self._finish_passage(passage, piece)
                found = tuple(words.take(piece.words, is_last=is_last))
                whole = self._piece(pcm_S, found, piece.coverage)
                left_s -= len(piece.pcm_S) / self._sample_rate
                if following is not None and self._next is None and left_s < AHEAD_S:
                    self._next = self._begin(following, max(0.0, left_s))
                yield whole

    def _pause_s(self, passage: Passage) -> float:
        """The silence before a passage: its own, else the rest of the model's between sentences."""
        if passage.pause_s is not None:
            return passage.pause_s
        if self._last is None or self._rest_s:
            return 0.0
        return self._front.rest_s(self._last.boundary) / self._call.speed

    def _silence(self, seconds: float) -> Pcm:
        return np.zeros(round(seconds * self._sample_rate), np.float32)

    def _finish_passage(self, passage: Passage, last: SpeechPiece) -> None:
        self._last = passage
        self._num_letters += passage.num_letters
        self._num_spoken += passage.num_letters * last.coverage
        if self._finish == "stop":
            self._finish = last.finish_reason or "stop"

    def _piece(
        self, pcm_S: Pcm, words: tuple[SpokenWord, ...] = (), coverage: float = 1.0
    ) -> SpeechPiece:
        seconds = len(pcm_S) / self._sample_rate
        self._num_samples += len(pcm_S)
        if seconds:
            self._ends_s = max(self._ends_s, time.monotonic()) + seconds
        return SpeechPiece(pcm_S=pcm_S, words=words, usage=self._usage, coverage=coverage)

    def _end(self) -> SpeechPiece:
        """The last piece: the silence at the end, and the account of the whole."""
        share = self._num_spoken / self._num_letters if self._num_letters else 1.0
        last = self._piece(self._silence(self._rest_s + self._script.pause_s), coverage=share)
        return replace(last, finish_reason=self._finish)
