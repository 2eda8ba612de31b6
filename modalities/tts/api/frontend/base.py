"""The front end's interface: turns normalized text into segments for a speech model.

Owns the code common to front ends of all families, and the types that they and the speech service
use. Knows no model and loads no torch.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.modalities.tts.api.text.chunks import Utterance
from triptych.modalities.tts.api.text.spoken import Boundary, Span, SpokenText
from triptych.modalities.tts.api.text.tongues import Reading
from triptych.modalities.tts.api.timing import WordIds
from triptych.modalities.tts.wire import SpeechSegment


class Voice(msgspec.Struct, frozen=True, kw_only=True):
    """A voice as it is listed. `language` is a tag such as `en-US`, empty if it speaks any."""

    name: str
    description: str = ""
    language: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSegment:
    """One segment for the engine, and the utterance it speaks.

    `unspoken` are the stretches of `utterance.spoken.text` that this model has no sounds for, or
    reads by the rules of another language; they do not overlap. A segment without sounds holds no
    ids: it counts towards coverage, and is not sent to the engine. `words` are those of a model
    that knows when it speaks an id.
    """

    segment: SpeechSegment
    utterance: Utterance
    unspoken: tuple[Span, ...] = ()
    words: tuple[WordIds, ...] = ()

    @property
    def is_silent(self) -> bool:
        """Whether the segment has no ids."""
        return not self.segment.prompt_ids

    @property
    def voiced_fraction(self) -> float:
        """Share of the letters that have sounds; 1 where there are no letters."""
        text = self.utterance.spoken.text
        num_letters = sum(map(str.isalpha, text))
        num_lost = sum(sum(map(str.isalpha, text[start:end])) for start, end in self.unspoken)
        return 1.0 - num_lost / num_letters if num_letters else 1.0


@dataclass(kw_only=True, eq=False)
class FrontEnd(ABC):
    """One served speech model as the API process sees it. Thread-safe."""

    name: str
    sample_rate: int
    steps_per_s: float
    """Speech tokens per second of sound; 0 for a model that generates whole sentences."""
    voices: Sequence[Voice]
    """The built-in voices, in the order in which they are listed."""
    default_voice: str
    sampling: SamplingParams
    """The recommended sampling parameters; unused by a model that does not sample."""
    can_clone: bool = False
    """Whether the model imitates a recorded clip."""
    takes_instructions: bool = False
    """Whether the model follows instructions; else a call with them is refused."""
    takes_speed: bool = False
    """Whether the model applies `speed` itself; else its sound is stretched."""
    has_word_times: bool = False
    """Whether the model knows when it speaks each word."""
    word_lag_s: float = 0.0
    """How much later than a word's sound the model's ids of it begin and end."""
    tags: tuple[str, ...] = ()
    """Words that are commands to the model in angle brackets, such as "laugh"."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of the voices."""
    foreign_voices: frozenset[str] = frozenset()
    """Voices of other servers that the model lacks; its default speaks for them."""

    @cached_property
    def voices_by_name(self) -> Mapping[str, Voice]:
        """The built-in voices by name."""
        return {voice.name: voice for voice in self.voices}

    def check_language(self, language: str, voice: str) -> None:
        """Raise `UnsupportedOption` if a text in `language` cannot be read in a canonical `voice`.

        By default numbers and signs are read in English alone.
        """
        if language.lower().partition("-")[0] not in ("", "en"):
            raise UnsupportedOption(
                f"{self.name} reads numbers and signs in English: send en, en-US or en-GB, or leave"
                " language out.",
                param="language",
            )

    def reading(self, language: str, voice: str, text: str = "") -> Reading | None:
        """How `text` is read, whose language and canonical voice are given; see `check_language`.

        Without a language, the voice's own applies, of a mixture the first one's. `None`: numbers
        and signs are left as they are written.
        """
        own = (known.language for known in self.voices if voice.startswith(known.name))
        is_british = (language or next(own, "")).lower().replace("_", "-") == "en-gb"
        return "uk" if is_british else "us"

    @abstractmethod
    def check_voice(self, voice: str) -> str:
        """The canonical name of `voice`. Raises `InvalidRequest` that lists the voices."""

    def known_voice(self, voice: str) -> str:
        """Resolve an alias. Raises `InvalidRequest` that lists the nearest names, or some."""
        name, known = voice.strip().lower(), self.voices_by_name
        if name in known:
            return name
        if name in self.aliases:
            return self.aliases[name]
        if self.replaces(name):
            return self.default_voice
        near = difflib.get_close_matches(name, known, n=3) or list(known)[:8]
        others = " and others" if len(near) < len(known) else ""
        raise InvalidRequest(
            f"{self.name} has no voice {voice[:40]!r}; it has {', '.join(near)}{others}.",
            param="voice",
        )

    def rest_s(self, boundary: Boundary) -> float:
        """The rest after an utterance that ends with `boundary`, beyond what the model makes."""
        return 0.0

    def replaces(self, voice: str) -> bool:
        """Whether the default speaks for `voice`, a voice of another server."""
        return voice.strip().lower() in self.foreign_voices

    def clip_ids(self, transcript: str) -> tuple[int, ...]:
        """The ids before the sound of a clip that says `transcript`; none by default.

        The words are empty where they are not known.
        """
        return ()

    def plan(
        self, spoken: SpokenText, *, voice: str, instructions: str, language: str = ""
    ) -> Iterator[PlannedSegment]:
        """The segments that say `spoken`, computed lazily.

        `voice` is a canonical name. The utterances cover the whole text, in order. Raises
        `InvalidRequest` for options the model does not support.
        """
        if instructions and not self.takes_instructions:
            raise UnsupportedOption(
                f"{self.name} does not support instructions; choose another voice instead.",
                param="instructions",
            )
        return self._plan(spoken, voice, instructions, language)

    @abstractmethod
    def _plan(
        self, spoken: SpokenText, voice: str, instructions: str, language: str
    ) -> Iterator[PlannedSegment]:
        """As `plan`, after the check of `instructions`."""
