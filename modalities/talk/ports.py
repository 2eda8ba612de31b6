"""The interfaces between a spoken conversation and its parts: turns, recognition and speech.

Owns the protocols and the plain data that passes between them. A session composes the parts and
knows no model; a part knows neither sessions nor events of a wire.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from triptych.core.media.audio.resampling import Pcm
from triptych.modalities.asr.api.service import TranscribeCall
from triptych.modalities.tts.api.service import SpeechCall

HEARING_RATE = 16_000
"""Sample rate (Hz) of everything that is heard: mono float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """When a turn begins and ends, with OpenAI's names and defaults of server_vad.

    `threshold` is the probability of speech from 0 to 1. `idle_timeout_ms` is the silence after
    which `IdleTimedOut` is reported, counted from the last `TurnDetector.rest`; `None`: never.
    `reports_suspicion` adds `SpeechSuspected` and `SpeechDismissed`.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    idle_timeout_ms: int | None = None
    reports_suspicion: bool = False


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """Speech began. `at_ms` counts the pushed sound, and is `prefix_padding_ms` early."""

    at_ms: int


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """The turn ended. `at_ms` counts the pushed sound: the speech, not the silence after it."""

    at_ms: int


@dataclass(frozen=True, slots=True)
class IdleTimedOut:
    """Silence lasted from `start_ms` to `end_ms` of the pushed sound."""

    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class SpeechSuspected:
    """Speech may have begun at `at_ms`: `SpeechStarted` or `SpeechDismissed` follows soon."""

    at_ms: int


@dataclass(frozen=True, slots=True)
class SpeechDismissed:
    """A suspicion was not confirmed until `at_ms`."""

    at_ms: int


TurnEvent: TypeAlias = (
    SpeechStarted | SpeechStopped | IdleTimedOut | SpeechSuspected | SpeechDismissed
)


class TurnDetector(Protocol):
    """Finds the turns in one stream of sound. Its clock is the sound: equal pushes, equal events.

    `SpeechStarted` and `SpeechStopped` alternate. A frame takes milliseconds: `push` may run on the
    event loop for pieces of up to 100 ms, and belongs on a thread for longer ones.
    """

    def push(self, pcm_S: Pcm, *, is_answering: bool = False) -> Sequence[TurnEvent]:
        """Take the next samples at `HEARING_RATE`, any number, and return what they end.

        `is_answering`: an answer is or was just played, whose echo should begin no turn.
        """
        ...

    def rest(self) -> None:
        """Begin to count silence for `IdleTimedOut` from here: an answer has been played."""
        ...

    def reset(self) -> None:
        """Forget speech that is under way, as after a clear; the clock goes on."""
        ...


class LiveTranscriber(Protocol):
    """Transcribes one turn while it is spoken. Its jobs are one caller's, and end with it."""

    def push(self, pcm_S: Pcm) -> None:
        """Take the next samples at `HEARING_RATE`. Never waits."""
        ...

    def deltas(self) -> AsyncGenerator[str, None]:
        """Yield pieces of the text as soon as they are settled; ends once `finish` has.

        Joined they are the beginning of the final text, so far as it can be known early.
        """
        ...

    def on_expected(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with the whole text once it is known in a pause, and with "" if more is said.

        So an answer may be prepared before it is certain that the turn has ended. Never called
        after `finish`.
        """
        ...

    async def finish(self) -> str:
        """Return the text of all that was pushed; empty for silence. Raises `RequestError`s."""
        ...

    async def close(self) -> None:
        """Cancel what still runs. May be called at any time, also twice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenChunk:
    """Sound [S] at `sample_rate`, and the `text` that begins with it.

    The first chunk of a sentence has its whole text, the others none: joined, the texts are the
    answer as it was written, and the sound between two texts says the first of them.
    """

    text: str
    pcm_S: Pcm
    sample_rate: int


class SpokenAnswer(Protocol):
    """Speaks an answer while it is written."""

    def speak(
        self, texts: AsyncIterator[str], call: SpeechCall
    ) -> AsyncGenerator[SpokenChunk, None]:
        """Yield the sound of text deltas in order, each sentence as soon as it is written.

        `call` has voice, speed and caller; its text is not read. Closing the generator cancels the
        jobs at once. Raises errors of speech calls, and those of `texts`.
        """
        ...


class Hearing(Protocol):
    """Opens what listens."""

    def open_detector(self, options: TurnOptions) -> TurnDetector:
        """Open a detector. Raises `InvalidRequest` for options out of range."""
        ...

    def open_transcriber(self, call: TranscribeCall) -> LiveTranscriber:
        """Open a transcriber of one turn. Raises `RequestError`s for a bad call."""
        ...
