"""The front end of models that are told words: tokens of the text between marks of their own.

Owns how long their utterances are and how long they may take; how a family spells a prompt is its
`PromptSpelling`. What a user typed is never read as a mark. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from triptych.core.errors import UnsupportedOption, WeightsError
from triptych.core.sampling_params import SamplingParams
from triptych.core.text.tokenizer import encode, read_tokenizer
from triptych.modalities.tts.api.frontend.base import PlannedSegment, Voice, unknown_voice
from triptych.modalities.tts.api.text.chunks import ChunkLimits, Utterance, split_utterances
from triptych.modalities.tts.api.text.guard import expected_duration
from triptych.modalities.tts.api.text.spoken import Boundary, SpokenText
from triptych.modalities.tts.wire import SpeechSegment

_MAX_CHARACTERS = 280
"""Of an utterance: some 18 s of speech, which these models say without losing their way."""
_FIRST_CHARACTERS = (100, 180)
_PARAGRAPH_PAUSE_S = 0.4


class PromptTokenizer:
    """A model's tokenizer, with which no text can spell a mark."""

    def __init__(self, folder: Path, name: str) -> None:
        self._tokenizer = read_tokenizer(folder, name)
        self._tokenizer.encode_special_tokens = True

    def ids(self, text: str, *, has_marks: bool = False) -> tuple[int, ...]:
        """The ids of a text; with the marks its tokenizer puts around texts, or without."""
        (encoding,) = encode(self._tokenizer, [text], add_special_tokens=has_marks)
        return tuple(encoding.ids)

    def mark(self, token: str) -> int:
        """The id of a mark. Raises `WeightsError` where the tokenizer has none of that name."""
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise WeightsError(f"tokenizer.json has no token {token!r}, which this model needs.")
        return int(token_id)


class PromptSpelling(Protocol):
    """How a family spells what shall be said."""

    def segment_ids(self, text: str, voice: str, instructions: str) -> tuple[int, ...]:
        """The prompt of a text in a voice of the model, or in a clip's where it is of no name."""
        ...

    def clip_ids(self, transcript: str) -> tuple[int, ...]:
        """What comes before the sound of a clip that says `transcript`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTraits:
    """What a family's front end says of itself.

    `steps_per_s` are token steps; `tags` in angle brackets are orders to the model.
    """

    sample_rate: int
    steps_per_s: float
    voices: tuple[Voice, ...]
    can_clone: bool
    takes_instructions: bool
    sampling: SamplingParams
    tags: tuple[str, ...] = ()


class PromptFrontEnd:
    """Implements `frontend.base.FrontEnd` for one served model of words.

    `sampling` is what the model speaks best with; `tags` in angle brackets are orders to it.
    """

    takes_speed = False

    def __init__(self, name: str, spelling: PromptSpelling, traits: PromptTraits) -> None:
        self.name = name
        self.sample_rate = traits.sample_rate
        self.voices: Sequence[Voice] = traits.voices
        self.default_voice = traits.voices[0].name
        self.can_clone = traits.can_clone
        self.takes_instructions = traits.takes_instructions
        self.sampling = traits.sampling
        self.tags = traits.tags
        self._spelling = spelling
        self._steps_per_s = traits.steps_per_s

    def check_voice(self, voice: str) -> str:
        """The canonical name of a voice. Raises `InvalidRequest` naming those there are."""
        wanted = voice.strip().lower()
        names = [known.name for known in self.voices]
        if not wanted:
            return self.default_voice
        if wanted in names:
            return wanted
        raise unknown_voice(self.name, voice, names)

    def clip_ids(self, transcript: str) -> tuple[int, ...]:
        """What comes before the sound of a clip that says `transcript`."""
        return self._spelling.clip_ids(transcript)

    def plan(
        self, spoken: SpokenText, *, voice: str, instructions: str, language: str = ""
    ) -> Iterator[PlannedSegment]:
        """One segment per utterance. Raises `UnsupportedOption` for what it cannot do."""
        if instructions and not self.takes_instructions:
            raise UnsupportedOption(
                f"{self.name} does not follow instructions; leave them out.", param="instructions"
            )
        limits = ChunkLimits(most=_MAX_CHARACTERS, first_most=_FIRST_CHARACTERS)
        for index, utterance in enumerate(split_utterances(spoken, limits)):
            is_last = utterance.source.end == spoken.source.end
            is_paragraph = utterance.boundary is Boundary.PARAGRAPH and not is_last
            yield PlannedSegment(
                segment=self._segment(
                    utterance, voice, instructions, _PARAGRAPH_PAUSE_S if is_paragraph else 0.0
                ),
                utterance=replace(utterance, index=index),
            )

    def _segment(
        self, utterance: Utterance, voice: str, instructions: str, pause_s: float
    ) -> SpeechSegment:
        if utterance.spoken.is_silent:
            return SpeechSegment(prompt_ids=())
        likely = expected_duration(utterance.text)
        return SpeechSegment(
            prompt_ids=self._spelling.segment_ids(utterance.text, voice, instructions),
            max_steps=likely.max_tokens(self._steps_per_s),
            pause_s=pause_s,
        )
