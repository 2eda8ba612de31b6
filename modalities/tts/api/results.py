"""Speech as its callers see it: the pieces of a call, its options, the formats of files.

Owns these types. Knows neither the engine nor HTTP, so a command whose text is spoken by a server
loads no more.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

import msgspec

from triptych.core.errors import ConfigError
from triptych.core.media.audio.containers import FORMATS
from triptych.core.media.audio.resampling import Pcm
from triptych.modalities.tts.wire import SpeechDelta, SpeechFinish

if TYPE_CHECKING:  # coverage and what it reads are of the process that speaks
    from triptych.modalities.tts.api.text.coverage import Coverage


InputFormat: TypeAlias = Literal["text", "ssml"]
"""What a text is: words, or SSML that says how they are spoken."""


class SpeakOptions(TypedDict, total=False):
    """Options of a call, as the fields of `SpeechCall`."""

    voice: str
    speed: float
    instructions: str
    language: str
    input_format: InputFormat
    dialect: Literal["us", "uk"] | None
    acronyms: Literal["spell", "keep"]
    emoji: Literal["drop", "name"]
    has_word_times: bool
    seed: int | None


class SpeechUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one call so far: prompt phonemes or tokens, and steps of generated speech."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    def plus(self, delta: SpeechDelta | SpeechUsage) -> SpeechUsage:
        """Add the counts of another job or call."""
        return SpeechUsage(
            num_prompt_tokens=self.num_prompt_tokens + delta.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens + delta.num_cached_tokens,
            num_output_tokens=self.num_output_tokens + delta.num_output_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenWord:
    """A word with its times, in seconds from the start of the sound.

    `text` is that of the call's characters `source`: with its marks, and as it was written.
    """

    text: str
    start_s: float
    end_s: float
    source: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechPiece:
    """The sound of one step: samples [S] at the model's rate, full scale -1 to 1.

    `words` are those whose times became known with it: all, in order, from a model that knows them.
    The last piece has a `finish_reason`: "stop", or the reason of the first segment that did not
    end by itself. `coverage` is the spoken share of the text planned so far.
    """

    pcm_S: Pcm
    words: tuple[SpokenWord, ...] = ()
    usage: SpeechUsage
    coverage: float
    finish_reason: SpeechFinish | None = None


@dataclass(frozen=True, slots=True)
class SpeechStream:
    """The sound of one call. Nothing runs before the first piece is requested.

    Closing `pieces` cancels the jobs. `speakable` returns which share of the text the model has
    sounds for; await it after the first piece. `ignored` are the wishes that change nothing.
    """

    sample_rate: int
    pieces: AsyncGenerator[SpeechPiece, None]
    speakable: Callable[[], Awaitable[Coverage]]
    ignored: tuple[str, ...] = ()


def format_of(path: str | Path) -> str:
    """The audio format of a file's extension. Raises `ConfigError` if it is unknown."""
    suffix = Path(path).suffix.lower().removeprefix(".")
    audio_format = "opus" if suffix == "ogg" else suffix
    if audio_format not in FORMATS:
        raise ConfigError(
            f"{Path(path).name} has no known audio extension: use .{', .'.join(FORMATS)}, or"
            " give the format."
        )
    return audio_format
