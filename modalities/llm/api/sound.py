"""The interface between chat and sound: what hears messages and speaks answers.

Owns the protocol and its plain data. Chat knows neither recognition nor speech: what composes them
sets `LlmService.sound`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from triptych.core.engine_api.caller import Caller
from triptych.core.media.audio.resampling import Pcm

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
class AnswerSound:
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

    def is_replaced(self, choice: VoiceChoice) -> bool:
        """Whether another voice speaks: the model lacks this one of another server."""
        ...

    def speak(
        self, texts: AsyncIterator[str], choice: VoiceChoice, caller: Caller
    ) -> AsyncGenerator[AnswerSound, None]:
        """Speak an answer while it is written. Closing the generator ends both."""
        ...

    async def hear(self, data: bytes | bytearray, form: str, caller: Caller) -> HeardSpeech:
        """Transcribe a file in the format `form`. Raises `RequestError`s about `messages`."""
        ...
