"""The front end of models that are told phonemes: Kokoro, and the embedded voice.

Owns how long such a model's utterances are, which ids say them, how long they may take, and which
voices there are. How letters become phonemes is `text.phonemes`' business. Loads no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from triptych.core.errors import UnsupportedOption
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.api.frontend.base import PlannedSegment, Voice, unknown_voice
from triptych.modalities.tts.api.frontend.phoneme_models import PhonemeModel, read_phoneme_model
from triptych.modalities.tts.api.text.chunks import ChunkLimits, Utterance, split_utterances
from triptych.modalities.tts.api.text.guard import expected_duration
from triptych.modalities.tts.api.text.phonemes import Dialect, Phonemes, Phonemizer
from triptych.modalities.tts.api.text.spoken import Span, SpokenText
from triptych.modalities.tts.configs.mixture import parse_mixture
from triptych.modalities.tts.wire import SpeechSegment

MAX_CHARACTERS = 220
"""Of an utterance; some 14 s of speech."""
_MIN_FIRST_CHARACTERS, _MAX_FIRST_CHARACTERS = 16, 72
_LONGEST_WORD = 32  # longer ones are cut
_NEXT_CHARACTERS = (80, 150)
"""Of the second and the third: who speaks twice as fast as it is heard has each ready when the one
before it has been played."""

_CLAUSE = re.compile(r"[^\s.,;:!?…—)]{2}[.,;:!?…—)]+\"? ")
_LANGUAGES: Mapping[str, Dialect] = {"en": "us", "en-us": "us", "en-gb": "uk"}


@dataclass(frozen=True, slots=True)
class _Ids:
    """What an utterance is said with, and what of it cannot be said."""

    ids: tuple[int, ...]
    unspoken: tuple[Span, ...]


class PhonemeFrontEnd:
    """Implements `frontend.base.FrontEnd` for one served model of phonemes."""

    can_clone = False
    takes_instructions = False
    tags: tuple[str, ...] = ()

    def __init__(self, name: str, model: PhonemeModel, phonemizer: Phonemizer) -> None:
        self.name = name
        self.sample_rate = model.sample_rate
        self.takes_speed = model.takes_speed
        self.sampling = model.sampling
        self.voices: Sequence[Voice] = model.voices
        self.default_voice = model.default_voice
        self._model = model
        self._phonemizer = phonemizer
        self._by_name = {voice.name: voice for voice in model.voices}

    @classmethod
    def open(cls, resolved: ResolvedModel, config: Mapping[str, Any]) -> PhonemeFrontEnd:
        """The front end of a model's folder; its phonemes are loaded in the background."""
        phonemizer = Phonemizer()
        phonemizer.warm()
        return cls(resolved.name, read_phoneme_model(resolved.folder, config), phonemizer)

    def check_voice(self, voice: str) -> str:
        """The canonical name of a voice, an OpenAI voice or a mixture. Raises `InvalidRequest`."""
        if not voice:
            return self.default_voice
        if not self._model.mixes_voices:
            return self._known(voice)
        parts = [(self._known(name), share) for name, share in parse_mixture(voice)]
        if len(parts) == 1:
            return parts[0][0]
        return "+".join(f"{name}*{share:.4g}" for name, share in parts)

    def plan(
        self, spoken: SpokenText, *, voice: str, instructions: str, language: str = ""
    ) -> Iterator[PlannedSegment]:
        """One segment per utterance. Raises `UnsupportedOption` for what it cannot do."""
        if instructions:
            raise UnsupportedOption(
                f"{self.name} does not follow instructions; choose another voice instead.",
                param="instructions",
            )
        return self._plan(spoken, self._dialect(voice, language))

    def _plan(self, spoken: SpokenText, dialect: Dialect) -> Iterator[PlannedSegment]:
        limits = _limits(spoken.text, streams=self._model.steps_per_s > 0)
        utterances = split_utterances(spoken, limits)
        fitting = (part for whole in utterances for part in self._fitting(whole, dialect))
        for index, (part, sounds) in enumerate(fitting):
            is_last = part.source.end == spoken.source.end
            pause_s = self._model.pauses_s.get(part.boundary, 0.0)
            yield PlannedSegment(
                segment=self._segment(part, sounds, 0.0 if is_last else pause_s),
                utterance=replace(part, index=index),
                unspoken=sounds.unspoken,
            )

    def _fitting(self, utterance: Utterance, dialect: Dialect) -> Iterator[tuple[Utterance, _Ids]]:
        """The utterance, halved until its phonemes are no more than the model takes."""
        sounds = self._ids(self._phonemizer(utterance.spoken, dialect))
        num_characters = len(utterance.spoken.text)
        if len(sounds.ids) <= self._model.max_phonemes or num_characters < 2:
            yield utterance, sounds
            return
        for part in split_utterances(utterance.spoken, ChunkLimits(most=num_characters // 2 + 1)):
            is_last = part.source.end == utterance.source.end
            boundary = utterance.boundary if is_last else part.boundary
            yield from self._fitting(replace(part, boundary=boundary), dialect)

    def _segment(self, utterance: Utterance, sounds: _Ids, pause_s: float) -> SpeechSegment:
        if not sounds.ids:
            return SpeechSegment(prompt_ids=())
        max_steps = 0
        if self._model.steps_per_s:
            likely = expected_duration(utterance.text, num_phonemes=len(sounds.ids))
            max_steps = likely.max_tokens(self._model.steps_per_s)
        prompt_ids = (*self._model.prompt_prefix, *sounds.ids, *self._model.prompt_suffix)
        return SpeechSegment(prompt_ids=prompt_ids, max_steps=max_steps, pause_s=pause_s)

    def _ids(self, phonemes: Phonemes) -> _Ids:
        """Ids of the words, parted by a space. A word that has none left is not spoken."""
        vocab = self._model.vocab
        words: list[list[int]] = []
        unspoken = list(phonemes.unspoken)
        for word in phonemes.words:
            ids = [vocab[symbol] for symbol in word.phonemes if symbol in vocab]
            if ids:
                words.append(ids)
            else:
                unspoken.append(word.spoken)
        if phonemes.is_silent:
            return _Ids((), tuple(unspoken))
        space = [vocab[" "]] if " " in vocab else []
        joined = [token for word in words for token in (*space, *word)]
        return _Ids(tuple(joined[len(space) :]), tuple(sorted(unspoken)))

    def _known(self, voice: str) -> str:
        """A voice's own name. OpenAI's names stand for voices of the model."""
        name = voice.strip().lower()
        if name in self._by_name:
            return name
        if name in self._model.aliases:
            return self._model.aliases[name]
        raise unknown_voice(self.name, voice, self._by_name)

    def _dialect(self, voice: str, language: str) -> Dialect:
        """The English that is asked for, else that of the voice's first part."""
        tag = language.strip().lower().replace("_", "-")
        if tag and tag not in _LANGUAGES:
            raise UnsupportedOption(
                f"{self.name} speaks English only (en-US, en-GB), not {language[:20]!r}.",
                param="language",
            )
        first = parse_mixture(voice)[0][0] if self._model.mixes_voices else voice
        own = self._by_name[first].language.lower()
        return _LANGUAGES.get(own if tag in ("", "en") else tag, "us")


def _limits(text: str, *, streams: bool) -> ChunkLimits:
    """The first utterance ends with the first clause, so that sound begins soon, if that is near.

    Where it is not, a break between words cannot be helped, but for a model that streams: that
    begins to sound at once, whatever the length.
    """
    clause = _CLAUSE.search(text, _MIN_FIRST_CHARACTERS, _MAX_FIRST_CHARACTERS)
    if streams:
        first_most = (max(clause.end(), _LONGEST_WORD),) if clause else ()
        return ChunkLimits(most=MAX_CHARACTERS, first_most=first_most)
    first = max(clause.end(), _LONGEST_WORD) if clause else _MAX_FIRST_CHARACTERS
    return ChunkLimits(most=MAX_CHARACTERS, first_most=(first, *_NEXT_CHARACTERS))
