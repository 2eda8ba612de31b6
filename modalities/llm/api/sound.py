"""The interface between chat and sound: what hears messages and speaks answers.

Owns the protocol, its plain data, and how writing and speaking of one answer are joined. Chat knows
neither recognition nor speech: what composes them sets `LlmService.sound`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from triptych.core.engine_api.caller import Caller
from triptych.core.media.audio.resampling import Pcm
from triptych.modalities.service import merge

Written = TypeVar("Written")
Spoken = TypeVar("Spoken")
_MAX_DELTAS = 64
"""Pieces of text that may wait for the speaker to take them."""
HEARD_TOKENS_PER_S, SPOKEN_TOKENS_PER_S = 10, 20
"""Tokens of sound in usage, as OpenAI counts them: one per 100 ms heard, one per 50 ms spoken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceChoice:
    """Who speaks: the name or id of a voice, and a speech model (empty: the defaults).

    An answer that `is_live` is played while it is written.
    """

    voice: str = ""
    model: str = ""
    is_live: bool = True


@dataclass(frozen=True, slots=True)
class SpokenPiece:
    """Sound [S] of an answer at `sample_rate` (Hz)."""

    pcm_S: Pcm
    sample_rate: int


@dataclass(frozen=True, slots=True)
class HeardSpeech:
    """The words of a recording, and its length."""

    text: str
    duration_s: float


class ChatSound(Protocol):
    """Hears and speaks for chat."""

    async def check_voice(self, choice: VoiceChoice, caller: Caller) -> int:
        """Return the rate (Hz) of a speech model's sound.

        Raises `RequestError`s for a model or a voice that there is not.
        """
        ...

    def speech_model(self, choice: VoiceChoice) -> str:
        """Return the name of the model that speaks. Raises `UnsupportedOption` if there is none."""
        ...

    def is_replaced(self, choice: VoiceChoice) -> bool:
        """Whether another voice speaks: the model lacks this one of another server."""
        ...

    def speak(
        self, texts: AsyncIterator[str], choice: VoiceChoice, caller: Caller
    ) -> AsyncGenerator[SpokenPiece, None]:
        """Speak an answer while it is written. Closing the generator ends both."""
        ...

    async def hear(self, data: bytes | bytearray, form: str, caller: Caller) -> HeardSpeech:
        """Transcribe a file in the format `form`. Raises `RequestError`s about `messages`."""
        ...


def written_and_spoken(
    written: AsyncGenerator[Written, None],
    words: Callable[[Written], Iterable[str]],
    speak: Callable[[AsyncIterator[str]], AsyncGenerator[Spoken, None]],
) -> AsyncGenerator[Written | Spoken, None]:
    """Yield an answer as it is `written`, and what `speak` makes of its `words`, as they come.

    Closing it closes both.
    """
    waiting: asyncio.Queue[str | None] = asyncio.Queue(_MAX_DELTAS)

    async def write() -> AsyncGenerator[Written | Spoken, None]:
        async with aclosing(written) as pieces:
            async for piece in pieces:
                yield piece
                for word in words(piece):
                    await waiting.put(word)
        await waiting.put(None)

    async def texts() -> AsyncGenerator[str, None]:
        while (text := await waiting.get()) is not None:
            yield text

    async def say() -> AsyncGenerator[Written | Spoken, None]:
        async with aclosing(speak(texts())) as sounds:
            async for sound in sounds:
                yield sound

    return merge([write(), say()])
