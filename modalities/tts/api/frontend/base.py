"""What turns a reader's text into what a speech model is asked to say.

Owns what front ends of all families share, and the nouns that they and the speech service use.
Knows no model and loads no torch.
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
from triptych.modalities.tts.api.text.spoken import Span, SpokenText
from triptych.modalities.tts.wire import SpeechSegment


class Voice(msgspec.Struct, frozen=True, kw_only=True):
    """A voice as it is listed. `language` is a tag such as `en-US`, empty where it speaks any."""

    name: str
    description: str = ""
    language: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSegment:
    """One segment for the engine, and the piece of text it speaks.

    `unspoken` are the stretches of `utterance.spoken.text` that this model has no sounds for, or
    reads by the rules of another language; none overlaps another.
    Where nothing of an utterance has any, the segment holds no ids: it belongs in the account of
    what was spoken, and not in the request.
    """

    segment: SpeechSegment
    utterance: Utterance
    unspoken: tuple[Span, ...] = ()

    @property
    def is_silent(self) -> bool:
        """Whether there is nothing to speak in it."""
        return not self.segment.prompt_ids

    @property
    def voiced_fraction(self) -> float:
        """Share of the letters that have their sounds; 1 where there are no letters."""
        text = self.utterance.spoken.text
        num_letters = sum(map(str.isalpha, text))
        num_lost = sum(sum(map(str.isalpha, text[start:end])) for start, end in self.unspoken)
        return 1.0 - num_lost / num_letters if num_letters else 1.0


@dataclass(kw_only=True, eq=False)
class FrontEnd(ABC):
    """One served speech model as the API process knows it. Safe to share by threads."""

    name: str
    sample_rate: int
    steps_per_s: float
    """Speech tokens per second of sound; 0 for a model that makes a sentence at once."""
    voices: Sequence[Voice]
    """Those it brings, in the order in which they are listed."""
    default_voice: str
    sampling: SamplingParams
    """How it speaks best; of no matter to a model that samples nothing at random."""
    can_clone: bool = False
    """Whether it imitates a recorded clip."""
    takes_instructions: bool = False
    """Whether it follows words about how to speak; else a call with them is refused by name."""
    takes_speed: bool = False
    """Whether it speaks faster or slower itself; else its sound is stretched."""
    tags: tuple[str, ...] = ()
    """Words that are orders to it where they stand in angle brackets, such as "laugh"."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of its voices."""

    @cached_property
    def voices_by_name(self) -> Mapping[str, Voice]:
        """Its voices under their own names."""
        return {voice.name: voice for voice in self.voices}

    @abstractmethod
    def check_voice(self, voice: str) -> str:
        """The canonical name of `voice`. Raises `InvalidRequest` naming those there are."""

    def known_voice(self, voice: str) -> str:
        """The own name of a voice. Raises `InvalidRequest` naming the nearest, or some."""
        name, known = voice.strip().lower(), self.voices_by_name
        if name in known:
            return name
        if name in self.aliases:
            return self.aliases[name]
        near = difflib.get_close_matches(name, known, n=3) or list(known)[:8]
        others = " and others" if len(near) < len(known) else ""
        raise InvalidRequest(
            f"{self.name} has no voice {voice[:40]!r}; it has {', '.join(near)}{others}.",
            param="voice",
        )

    def clip_ids(self, transcript: str) -> tuple[int, ...]:
        """What comes before the sound of a clip that says `transcript`; nothing by default."""
        return ()

    def plan(
        self, spoken: SpokenText, *, voice: str, instructions: str, language: str = ""
    ) -> Iterator[PlannedSegment]:
        """The segments that say `spoken`, each worked out when it is asked for.

        `voice` is a canonical name. The utterances are the whole text, in order. Raises
        `InvalidRequest` for what the model cannot do.
        """
        if instructions and not self.takes_instructions:
            raise UnsupportedOption(
                f"{self.name} does not follow instructions; choose another voice instead.",
                param="instructions",
            )
        return self._plan(spoken, voice, instructions, language)

    @abstractmethod
    def _plan(
        self, spoken: SpokenText, voice: str, instructions: str, language: str
    ) -> Iterator[PlannedSegment]:
        """As `plan`, for instructions that the model takes."""
