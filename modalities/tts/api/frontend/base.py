"""What turns a reader's text into what a speech model is asked to say.

Owns the protocol between the speech service and the model families, and the nouns they share.
Knows no model and loads no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from triptych.core.errors import InvalidRequest
from triptych.core.sampling_params import SamplingParams
from triptych.modalities.tts.api.text.chunks import Utterance
from triptych.modalities.tts.api.text.spoken import Span, SpokenText
from triptych.modalities.tts.wire import SpeechSegment


class Voice(msgspec.Struct, frozen=True, kw_only=True):
    """A voice as it is listed. `language` is a tag such as `en-US`, empty where it speaks any."""

    name: str
    description: str = ""
    language: str = ""
    is_custom: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSegment:
    """One segment for the engine, and the piece of text it speaks.

    `unspoken` are the stretches of `utterance.spoken.text` that this model has no sounds for.
    Where nothing of an utterance has any, the segment holds no ids: it belongs in the account of
    what was spoken, and not in the request.
    """

    segment: SpeechSegment
    utterance: Utterance
    unspoken: tuple[Span, ...] = ()

    @property
    def is_silent(self) -> bool:
        """Whether nothing would be heard of it."""
        return not self.segment.prompt_ids

    @property
    def voiced_fraction(self) -> float:
        """Share of the letters that have sounds; 1 where there are no letters."""
        text = self.utterance.spoken.text
        num_letters = sum(map(str.isalpha, text))
        num_lost = sum(sum(map(str.isalpha, text[start:end])) for start, end in self.unspoken)
        return 1.0 - num_lost / num_letters if num_letters else 1.0


def unknown_voice(model: str, voice: str, names: Collection[str]) -> InvalidRequest:
    """What is said to who asks `model` for a voice that is not among `names`: the nearest."""
    near = difflib.get_close_matches(voice.strip().lower(), names, n=3) or list(names)[:8]
    others = " and others" if len(near) < len(names) else ""
    return InvalidRequest(
        f"{model} has no voice {voice[:40]!r}; it has {', '.join(near)}{others}.", param="voice"
    )


class FrontEnd(Protocol):
    """Knows how one served speech model wants to be told what to say. Safe to share by threads."""

    @property
    def name(self) -> str:
        """The name the model is served under."""
        ...

    @property
    def sample_rate(self) -> int:
        """Samples per second of its sound."""
        ...

    @property
    def voices(self) -> Sequence[Voice]:
        """The voices it brings, in the order they should be listed."""
        ...

    @property
    def default_voice(self) -> str:
        """The voice where none is asked for."""
        ...

    @property
    def can_clone(self) -> bool:
        """Whether it imitates a recorded clip."""
        ...

    @property
    def takes_instructions(self) -> bool:
        """Whether it follows words about how to speak; else they are refused by name."""
        ...

    @property
    def takes_speed(self) -> bool:
        """Whether it speaks faster or slower itself; else its sound is stretched."""
        ...

    @property
    def tags(self) -> tuple[str, ...]:
        """Words that are orders to it where they stand in angle brackets, such as "laugh"."""
        ...

    @property
    def sampling(self) -> SamplingParams:
        """How it speaks best; of no matter to a model that draws nothing at random."""
        ...

    def check_voice(self, voice: str) -> str:
        """The canonical name of `voice`. Raises `InvalidRequest` naming those there are."""
        ...

    def plan(
        self, spoken: SpokenText, *, voice: str, instructions: str, language: str = ""
    ) -> Iterator[PlannedSegment]:
        """The segments that say `spoken`, each worked out when it is asked for.

        `voice` is a canonical name. The utterances are the whole text, in order. Raises
        `InvalidRequest` for what the model cannot do.
        """
        ...
