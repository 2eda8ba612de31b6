"""Speaks an answer while it is written: pieces of text go in, sound comes out in their order.

Owns the hand-over from writing to speaking: what waits, how urgent the next piece is, the rests
between pieces, and that both end together. Pieces are found in `cutting`, sound in the speech
service. Knows no chat and no wire.

What is read aloud: the words of the answer. Marks of Markdown, targets of links and emoji are
dropped, the cells of a table are read row by row, and blocks of code are left out; reasoning and
calls of tools never come here. The text of what is left out is still in the chunks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np

from triptych.modalities.talk.ports import SpokenChunk
from triptych.modalities.talk.speaking.cutting import MAX_WINDOW, AnswerCutter, AnswerPiece
from triptych.modalities.tts.api.frontend.base import FrontEnd
from triptych.modalities.tts.api.service import SpeechCall, SpeechService
from triptych.modalities.tts.api.text.guard import Unspeakable, estimate_seconds
from triptych.modalities.tts.api.text.spoken import Boundary

URGENT_S = 1.0
"""Seconds of sound ahead of playback under which the next words are not made to wait."""
MAX_WAITING = 65_536
"""Characters that may wait to be spoken: then the writer waits, too."""
_logger = logging.getLogger(__name__)


class AnswerSpeaker:
    """Implements `ports.SpokenAnswer` with a speech service. Answers do not share any state."""

    def __init__(self, service: SpeechService) -> None:
        self._service = service

    async def speak(
        self, texts: AsyncIterator[str], call: SpeechCall
    ) -> AsyncGenerator[SpokenChunk, None]:
        """Yield the sound of text deltas in order (see `ports.SpokenAnswer.speak`)."""
        front, _ = self._service.check(call)
        ahead = _Ahead()
        with self._service.admitted(call, MAX_WINDOW) as admitted:
            writer = asyncio.create_task(_write(texts, ahead))
            try:
                speaking = _Speaking(self._service, front, admitted, ahead)
                async with aclosing(speaking.chunks()) as chunks:
                    async for chunk in chunks:
                        yield chunk
                await writer  # raises its error
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)


@dataclass(slots=True)
class _Ahead:
    """The lead over playback: sound that waits to be played, and text that waits for sound."""

    sound_until_s: float = 0.0
    _pieces: deque[AnswerPiece] = field(default_factory=deque)
    _num_characters: int = 0
    _silent_s: float = 0.0  # of text without sound
    _left_s: float = 0.0  # of the piece that is being spoken
    _is_over: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_urgent(self) -> bool:
        """Whether a listener will soon have heard all that was written so far."""
        return self.sound_until_s + self._silent_s - time.monotonic() < URGENT_S

    async def put(self, piece: AnswerPiece) -> None:
        """Add a piece, once there is room."""
        while self._num_characters > MAX_WAITING:
            self._changed.clear()
            await self._changed.wait()
        self._pieces.append(piece)
        self._num_characters += len(piece.text)
        if piece.is_spoken:
            self.sound_until_s = max(self.sound_until_s, time.monotonic())
            self._silent_s += estimate_seconds(piece.text)
        self._changed.set()

    def end(self) -> None:
        """No piece will be added."""
        self._is_over = True
        self._changed.set()

    async def next(self) -> AnswerPiece | None:
        """Return the next piece, `None` after the last one."""
        while not self._pieces and not self._is_over:
            self._changed.clear()
            await self._changed.wait()
        if not self._pieces:
            return None
        piece = self._pieces.popleft()
        self._num_characters -= len(piece.text)
        self._changed.set()
        return piece

    def begin(self, piece: AnswerPiece) -> None:
        """A piece is being spoken; what is left of the one before has no sound any more."""
        self._silent_s -= self._left_s
        self._left_s = estimate_seconds(piece.text) if piece.is_spoken else 0.0

    def play(self, seconds: float) -> None:
        """Count sound that was handed on."""
        self.sound_until_s = max(self.sound_until_s, time.monotonic()) + seconds
        heard_s = min(seconds, self._left_s)
        self._left_s -= heard_s
        self._silent_s -= heard_s


async def _write(texts: AsyncIterator[str], ahead: _Ahead) -> None:
    """Cut the answer as it arrives. Ends `texts` if it is cancelled.

    Of an answer that fails, what was written is spoken before the error is raised.
    """
    cutter = AnswerCutter()
    try:
        try:
            async for text in texts:
                cutter.push(text)
                while piece := cutter.next(is_urgent=ahead.is_urgent):
                    await ahead.put(piece)
        except Exception:
            await _put_rest(cutter, ahead)
            raise
        await _put_rest(cutter, ahead)
    finally:
        ahead.end()
        if isinstance(texts, AsyncGenerator):
            await texts.aclose()


async def _put_rest(cutter: AnswerCutter, ahead: _Ahead) -> None:
    """Add the last pieces."""
    while piece := cutter.next(is_urgent=False, is_last=True):
        await ahead.put(piece)


class _Speaking:
    """The sound of one answer."""

    def __init__(
        self, service: SpeechService, front: FrontEnd, call: SpeechCall, ahead: _Ahead
    ) -> None:
        self._service = service
        self._front = front
        self._call = call
        self._ahead = ahead
        self._num_pieces = 0
        self._last: Boundary | None = None

    async def chunks(self) -> AsyncGenerator[SpokenChunk, None]:
        """The sound of all pieces."""
        while (piece := await self._ahead.next()) is not None:
            self._ahead.begin(piece)
            if not piece.is_spoken:
                yield self._chunk(piece.text)
                continue
            async with aclosing(self._say(piece)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _say(self, piece: AnswerPiece) -> AsyncGenerator[SpokenChunk, None]:
        """The sound of a piece after the rest that precedes it; its text is in the first chunk."""
        text = piece.text
        stream = self._service.speak(self._next_call(text))
        try:
            async with aclosing(stream.pieces) as pieces:
                async for sound in pieces:
                    pcm_S = sound.pcm_S
                    if text and len(pcm_S):
                        pcm_S = np.concatenate([self._rest(), pcm_S])
                    if len(pcm_S):
                        yield self._chunk(text, pcm_S)
                        text = ""
            self._last = piece.boundary
        except Unspeakable:
            _logger.warning("A piece of an answer has no sound: the model cannot pronounce it.")
        if text:
            yield self._chunk(text)

    def _next_call(self, text: str) -> SpeechCall:
        caller = self._call.caller
        self._num_pieces += 1
        return replace(
            self._call,
            text=text,
            queued_until_s=self._ahead.sound_until_s,
            caller=replace(caller, call_id=f"{caller.call_id}.say{self._num_pieces}"),
        )

    def _rest(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """The silence between the last piece and the next one."""
        seconds = 0.0 if self._last is None else self._front.rest_s(self._last)
        return np.zeros(round(seconds / self._call.speed * self._front.sample_rate), np.float32)

    def _chunk(self, text: str, pcm_S: np.ndarray | None = None) -> SpokenChunk:
        sound_S = np.zeros(0, np.float32) if pcm_S is None else pcm_S
        self._ahead.play(len(sound_S) / self._front.sample_rate)
        return SpokenChunk(text=text, pcm_S=sound_S, sample_rate=self._front.sample_rate)
