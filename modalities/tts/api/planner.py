"""Splits the text of a call into parts that are submitted one after another.

Owns planning ahead of playback, and where a long text is split into jobs. It runs on threads: texts
may be long, and the event loop serves streams meanwhile. Knows neither jobs nor sound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self, TypeAlias

from triptych.modalities.tts.api.frontend.base import PlannedSegment
from triptych.modalities.tts.api.text.coverage import Coverage
from triptych.modalities.tts.api.text.guard import Unspeakable, estimate_seconds
from triptych.modalities.tts.api.text.spoken import Boundary

FIRST_PART_S = 20.0
PART_S = 60.0
"""Estimated seconds of speech in a job.

A single job would have to wait until the last word has its phonemes (a millisecond per hundred
letters); a job per sentence would lose the context that a model carries from sentence to sentence.
So the first part is short enough to be planned at once. Later ones, planned while it is spoken,
last a minute, cut at a paragraph's end if there is one in their second half.
"""


SpeechPart: TypeAlias = tuple[PlannedSegment, ...]
"""Adjacent segments of a text that one job speaks, including those without sound."""


class SpeechPlanner:
    """Plans the parts of a text in the background while this context is open.

    `write` is called and iterated on threads, by one at a time. The context may be opened again
    inside itself; leaving either ends it.
    """

    def __init__(self, write: Callable[[], Iterator[PlannedSegment]]) -> None:
        self._write = write
        self._parts: asyncio.Queue[SpeechPart | None] = asyncio.Queue()
        self._task: asyncio.Task[Coverage] | None = None

    async def __aenter__(self) -> Self:
        self._task = self._task or asyncio.create_task(self._plan())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            self._task.exception()  # retrieved here; `coverage` raises it where it is awaited

    async def next_part(self) -> SpeechPart | None:
        """The next part, `None` after the last one. Raises the error of planning."""
        part = await self._parts.get()
        if part is None:
            await self.coverage()
        return part

    def next_if_ready(self) -> SpeechPart | None:
        """The next part if it is planned already, else `None`."""
        if self._parts.empty():
            return None
        part = self._parts.get_nowait()
        if part is None:
            self._parts.put_nowait(None)  # for `next_part`
        return part

    async def coverage(self) -> Coverage:
        """The share of the text that has sounds, once all is planned. Raises as `next_part`."""
        assert self._task is not None, "the context is open, or was"
        return await asyncio.shield(self._task)

    async def _plan(self) -> Coverage:
        coverage = Coverage()
        parts = _parts(self._write)
        try:
            while part := await asyncio.to_thread(next, parts, None):
                for entry in part:
                    coverage.expect(entry.utterance)
                    coverage.speak(entry.utterance, entry.voiced_fraction)
                self._parts.put_nowait(part)
        finally:
            self._parts.put_nowait(None)
        return coverage


def _parts(write: Callable[[], Iterator[PlannedSegment]]) -> Iterator[SpeechPart]:
    """Split a plan into parts that each have something to speak.

    Raises `Unspeakable` if nothing of the text can be spoken.
    """
    planned: list[PlannedSegment] = []
    most_s, length_s, is_full = FIRST_PART_S, 0.0, False
    for entry in write():
        if is_full and not entry.is_silent:
            yield tuple(planned)
            planned, most_s, length_s, is_full = [], PART_S, 0.0, False
        planned.append(entry)
        if not entry.is_silent:
            length_s += estimate_seconds(entry.utterance.text)
            is_paragraph = entry.utterance.boundary is Boundary.PARAGRAPH
            is_full = length_s >= (most_s / 2 if is_paragraph else most_s)
    if all(entry.is_silent for entry in planned):  # later parts begin with sound
        raise Unspeakable(
            "The model can pronounce none of these words: send text in a language it speaks.",
            param="input",
        )
    yield tuple(planned)
