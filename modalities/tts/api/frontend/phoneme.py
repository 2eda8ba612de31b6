"""The front end of models that read phonemes: Kokoro, and the embedded voice.

Owns how long such a model's utterances are, their ids, how long they may take, and reading each
model's alphabet and voices from its folder. `text.phonemes` converts letters to phonemes. Loads no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.errors import UnsupportedOption, WeightsError
from triptych.core.process.typed import convert
from triptych.core.weights.layout import read_layout
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.api.frontend.base import FrontEnd, PlannedSegment, Voice
from triptych.modalities.tts.api.text.chunks import Utterance, split_utterances
from triptych.modalities.tts.api.text.foreign import foreign_spans
from triptych.modalities.tts.api.text.guard import expected_duration
from triptych.modalities.tts.api.text.phonemes import MARKS, Phonemes, Phonemizer
from triptych.modalities.tts.api.text.readers import missing_extra
from triptych.modalities.tts.api.text.spoken import Boundary, Span, SpokenText, merge_spans
from triptych.modalities.tts.api.text.tongues import Reading, is_english, reading_of, tongue
from triptych.modalities.tts.api.timing import WordIds
from triptych.modalities.tts.configs.kokoro import (
    MODEL_TYPE,
    SAMPLE_RATE,
    VOCABULARY,
    VOICE_PREFIX,
    read_kokoro_config,
)
from triptych.modalities.tts.configs.mixture import parse_mixture
from triptych.modalities.tts.wire import SpeechSegment

MAX_CHARACTERS = 220
"""Maximum characters of an utterance: about 14 s of speech."""
_MIN_FIRST_CHARACTERS, _MAX_FIRST_CHARACTERS = 16, 72
_LONGEST_WORD = 32  # longer words are cut
_NEXT_CHARACTERS = (80, 150)
"""Maximum characters of the second and third utterance: a model at twice real time finishes each
before the previous one has been played.
"""

_CLAUSE = re.compile(r"[^\s.,;:!?…—)]{2}[.,;:!?…—)]+\"? ")
_ENGLISH: tuple[Reading, ...] = ("us", "uk")


@dataclass(frozen=True, slots=True)
class _PhonemeIds:
    """The phoneme ids of an utterance, the spoken spans of its words, and those without sound."""

    ids: tuple[int, ...]
    unspoken: tuple[Span, ...]
    words: tuple[WordIds, ...] = ()


@dataclass(kw_only=True, eq=False)
class PhonemeFrontEnd(FrontEnd):
    """Implements `FrontEnd` for one served model.

    Ids are those of `vocab`'s symbols; an utterance has at most `max_phonemes` of them, between
    `prompt_prefix` and `prompt_suffix`. `pauses_s` are the rests after an utterance, in addition to
    the model's own.
    """

    phonemizer: Phonemizer
    vocab: Mapping[str, int]
    max_phonemes: int
    pauses_s: Mapping[Boundary, float]
    mixes_voices: bool = False
    readings: tuple[Reading, ...] = _ENGLISH
    """The languages in whose sounds the model was trained."""
    prompt_prefix: tuple[int, ...] = ()
    prompt_suffix: tuple[int, ...] = ()

    def check_voice(self, voice: str) -> str:
        """The canonical name of a voice, an OpenAI voice or a mixture. Raises `InvalidRequest`."""
        if not voice:
            return self.default_voice
        if not self.mixes_voices:
            return self.known_voice(voice)
        parts = [(self.known_voice(name), share) for name, share in parse_mixture(voice)]
        if len(parts) == 1:
            return parts[0][0]
        return "+".join(f"{name}*{share:.4g}" for name, share in parts)

    def rest_s(self, boundary: Boundary) -> float:
        """The rest after an utterance that ends with `boundary`."""
        return self.pauses_s.get(boundary, 0.0)

    def replaces(self, voice: str) -> bool:
        """Whether the default speaks for `voice`, or for a voice of a mixture."""
        is_mixture = bool(voice) and self.mixes_voices
        names = [name for name, _ in parse_mixture(voice)] if is_mixture else [voice]
        return any(map(super().replaces, names))

    def _plan(
        self, spoken: SpokenText, voice: str, instructions: str, language: str
    ) -> Iterator[PlannedSegment]:
        self.check_language(language, voice)
        reading = self.reading(language, voice)
        if is_english(reading):
            known = partial(self.phonemizer.is_english, dialect=reading)
            spoken = replace(spoken, foreign=foreign_spans(spoken, known))
        first_most = _first_limits(spoken.text, streams=self.steps_per_s > 0)
        utterances = split_utterances(spoken, MAX_CHARACTERS, first_most)
        return (
            self._segment(part, sounds, is_last=part.source.end == spoken.source.end)
            for whole in utterances
            for part, sounds in self._split_to_fit(whole, reading)
        )

    def _segment(
        self, utterance: Utterance, sounds: _PhonemeIds, *, is_last: bool
    ) -> PlannedSegment:
        segment, max_steps = SpeechSegment(prompt_ids=()), 0
        spoken, before = utterance.spoken, len(self.prompt_prefix)
        words = tuple(
            word._replace(
                source=spoken.source_of(word.source),
                start=before + word.start,
                stop=before + word.stop,
            )
            for word in sounds.words
        )
        if sounds.ids:
            if self.steps_per_s:
                likely = expected_duration(utterance.text, num_phonemes=len(sounds.ids))
                max_steps = likely.max_tokens(self.steps_per_s)
            segment = SpeechSegment(
                prompt_ids=(*self.prompt_prefix, *sounds.ids, *self.prompt_suffix),
                max_steps=max_steps,
                pause_s=0.0 if is_last else self.rest_s(utterance.boundary),
            )
        unspoken = merge_spans([*sounds.unspoken, *spoken.foreign])
        return PlannedSegment(segment=segment, utterance=utterance, unspoken=unspoken, words=words)

    def _split_to_fit(
        self, utterance: Utterance, reading: Reading
    ) -> Iterator[tuple[Utterance, _PhonemeIds]]:
        """Split the utterance in halves until its phonemes fit the model."""
        sounds = self._ids(self.phonemizer(utterance.spoken, reading))
        num_characters = len(utterance.spoken.text)
        if len(sounds.ids) <= self.max_phonemes or num_characters < 2:
            yield utterance, sounds
            return
        for part in split_utterances(utterance.spoken, num_characters // 2 + 1):
            is_last = part.source.end == utterance.source.end
            boundary = utterance.boundary if is_last else part.boundary
            yield from self._split_to_fit(replace(part, boundary=boundary), reading)

    def _ids(self, phonemes: Phonemes) -> _PhonemeIds:
        """Ids of the words, separated by a space. A word without known symbols is unspoken."""
        vocab = self.vocab
        ids: list[int] = []
        words: list[WordIds] = []
        unspoken = list(phonemes.unspoken)
        for word in phonemes.words:
            known = [symbol for symbol in word.phonemes if symbol in vocab]
            if not known:
                unspoken.append(word.spoken)
                continue
            if ids and " " in vocab:
                if words and words[-1].stop == len(ids):
                    words[-1] = words[-1]._replace(stop=len(ids) + 1, shares_space=True)
                ids.append(vocab[" "])
            voiced = [at for at, symbol in enumerate(known, len(ids)) if symbol not in MARKS]
            if voiced:
                words.append(WordIds(word.spoken, voiced[0], voiced[-1] + 1))
            ids += (vocab[symbol] for symbol in known)
        if phonemes.is_silent:
            return _PhonemeIds((), tuple(unspoken))
        return _PhonemeIds(tuple(ids), tuple(sorted(unspoken)), tuple(words))

    def check_language(self, language: str, voice: str) -> None:
        """Raise `UnsupportedOption` for a language that the model lacks, or that needs a package.

        A language is asked for, or it is the voice's own.
        """
        tag = language or self._native(voice)
        reading = reading_of(tag)
        if reading is None or reading not in self.readings:
            known = ", ".join(_TAGS[each] for each in self.readings)
            raise UnsupportedOption(
                f"{self.name} reads {known}, not {tag[:20]!r}.", param="language"
            )
        if extra := missing_extra(reading):
            raise UnsupportedOption(
                f"{tongue(reading).name} needs a package that is not installed: pip install"
                f" 'triptych[{extra}]', or choose a voice of another language, such as"
                f" {self.default_voice}.",
                param="language" if language else "voice",
            )

    def reading(self, language: str, voice: str, text: str = "") -> Reading:
        """See `FrontEnd.reading`. Other English than en-US and en-GB is the voice's own."""
        native = reading_of(self._native(voice)) or "us"
        return reading_of(language, native) or native

    def _native(self, voice: str) -> str:
        """The language of a voice, of a mixture its first one's."""
        first = parse_mixture(voice)[0][0] if self.mixes_voices else voice
        return self.voices_by_name[first].language


def _first_limits(text: str, *, streams: bool) -> tuple[int, ...]:
    """Limits of the first utterances: the first ends with the first clause, if that is near.

    Then sound begins soon. Otherwise the cut is between words, except for a model that streams,
    which starts at once whatever the length.
    """
    clause = _CLAUSE.search(text, _MIN_FIRST_CHARACTERS, _MAX_FIRST_CHARACTERS)
    first = max(clause.end(), _LONGEST_WORD) if clause else _MAX_FIRST_CHARACTERS
    if streams:
        return (first,) if clause else ()
    return (first, *_NEXT_CHARACTERS)


# -- models --------------------------------------------------------------------------------------


OPENAI_VOICES: Mapping[str, str] = {
    "alloy": "af_alloy",
    "ash": "am_michael",
    "ballad": "bm_george",
    "cedar": "am_fenrir",
    "coral": "af_bella",
    "echo": "am_echo",
    "fable": "bm_fable",
    "marin": "af_heart",
    "nova": "af_nova",
    "onyx": "am_onyx",
    "sage": "af_sarah",
    "shimmer": "af_aoede",
    "verse": "am_puck",
}
"""The voice of Kokoro for each of OpenAI's names."""

KOKORO_VOICES = (
    *("af_alloy", "af_aoede", "af_bella", "af_heart", "af_jessica", "af_kore", "af_nicole"),
    *("af_nova", "af_river", "af_sarah", "af_sky", "am_adam", "am_echo", "am_eric", "am_fenrir"),
    *("am_liam", "am_michael", "am_onyx", "am_puck", "am_santa", "bf_alice", "bf_emma"),
    *("bf_isabella", "bf_lily", "bm_daniel", "bm_fable", "bm_george", "bm_lewis"),
)
"""Kokoro's English voices, which clients of other servers send."""

_OWN_VOICES: Mapping[str, str] = {
    theirs: ours.partition("_")[2]
    for theirs, ours in (*OPENAI_VOICES.items(), *((name, name) for name in KOKORO_VOICES))
}
"""The voice of our own model for each name, by the part of Kokoro's name after the accent."""

_KOKORO_PAUSES_S = {Boundary.CLAUSE: 0.08, Boundary.SENTENCE: 0.18, Boundary.PARAGRAPH: 0.5}
"""Kokoro's sentences have no silence around them; these are its own rests, and a longer one."""
_OWN_PAUSES_S = {Boundary.PARAGRAPH: 0.4}

_WORD_LAG_S = 0.075
"""Kokoro's durations come from an aligner that follows the sound by three frames of 25 ms, which
the package `kokoro` 0.9.4 subtracts (`KPipeline.join_timestamps`). Our own voice learned from a
teacher with the same durations.
"""

_DEFAULT_VOICE = "af_heart"
_ACCENTS = {
    "a": ("American", "en-US"),
    "b": ("British", "en-GB"),
    "e": ("Spanish", "es"),
    "f": ("French", "fr-FR"),
    "h": ("Hindi", "hi"),
    "i": ("Italian", "it"),
    "j": ("Japanese", "ja"),
    "p": ("Brazilian", "pt-BR"),
    "z": ("Mandarin", "zh"),
}
_TAGS: Mapping[Reading, str] = {
    "us": "en-US",
    "uk": "en-GB",
    "es": "es",
    "fr": "fr",
    "hi": "hi",
    "it": "it",
    "ja": "ja",
    "pt": "pt-BR",
    "zh": "zh",
}
_GENDERS = {"f": "woman", "m": "man"}


class _OwnVoice(msgspec.Struct, frozen=True, kw_only=True):
    """The part of our own model's config.json that a front end reads."""

    class Codec(msgspec.Struct, frozen=True):
        sample_rate: int
        hop: int
        frames_per_step: int

    codec: Codec
    voices: tuple[Voice, ...] = (Voice(name="heart", language="en-US"),)
    vocab: dict[str, int] = msgspec.field(default_factory=lambda: dict(VOCABULARY))
    max_phonemes: int = 400
    takes_speed: bool = False
    sampling: SamplingParams = SamplingParams()
    prompt_prefix: tuple[int, ...] = ()
    prompt_suffix: tuple[int, ...] = ()


def open_phoneme_model(
    resolved: ResolvedModel, config: Mapping[str, Any], phonemizer: Phonemizer | None = None
) -> PhonemeFrontEnd:
    """The front end of a model whose config.json holds `config`. Raises `WeightsError`.

    Without a `phonemizer` one is loaded in the background.
    """
    if phonemizer is None:
        phonemizer = Phonemizer()
        phonemizer.warm()
    if config.get("model_type") == MODEL_TYPE:
        return _open_kokoro(resolved, config, phonemizer)
    try:
        own = convert(dict(config), _OwnVoice)
    except msgspec.ValidationError as error:
        raise WeightsError(f"config.json does not describe the voice: {error}.") from error
    if not own.voices:
        raise WeightsError("config.json lists no voices.")
    default = own.voices[0].name
    aliases, foreign = _other_names(_OWN_VOICES, (voice.name for voice in own.voices))
    return PhonemeFrontEnd(
        name=resolved.name,
        sample_rate=own.codec.sample_rate,
        steps_per_s=own.codec.sample_rate / (own.codec.hop * own.codec.frames_per_step),
        voices=own.voices,
        default_voice=default,
        sampling=own.sampling,
        takes_speed=own.takes_speed,
        has_word_times=True,
        word_lag_s=_WORD_LAG_S,
        aliases=aliases,
        foreign_voices=foreign,
        phonemizer=phonemizer,
        vocab=own.vocab,
        max_phonemes=own.max_phonemes,
        pauses_s=_OWN_PAUSES_S,
        prompt_prefix=own.prompt_prefix,
        prompt_suffix=own.prompt_suffix,
    )


def _open_kokoro(
    resolved: ResolvedModel, config: Mapping[str, Any], phonemizer: Phonemizer
) -> PhonemeFrontEnd:
    kokoro = read_kokoro_config(config)
    names = sorted(
        name.removeprefix(VOICE_PREFIX)
        for name in read_layout(Path(resolved.folder))
        if name.startswith(VOICE_PREFIX)
    )
    if not names:
        raise WeightsError("This Kokoro has no voices: the folder voices/ was empty.")
    voices = tuple(map(_kokoro_voice, names))
    english = [voice.name for voice in voices if reading_of(voice.language) in _ENGLISH]
    default = _DEFAULT_VOICE if _DEFAULT_VOICE in names else (*english, *names)[0]
    aliases, foreign = _other_names(OPENAI_VOICES, names)
    return PhonemeFrontEnd(
        name=resolved.name,
        sample_rate=SAMPLE_RATE,
        steps_per_s=0.0,
        voices=voices,
        default_voice=default,
        sampling=SamplingParams(),
        takes_speed=True,
        has_word_times=True,
        word_lag_s=_WORD_LAG_S,
        aliases=aliases,
        foreign_voices=foreign,
        phonemizer=phonemizer,
        vocab=kokoro.vocab,
        max_phonemes=kokoro.max_phonemes,
        pauses_s=_KOKORO_PAUSES_S,
        mixes_voices=True,
        readings=(*_ENGLISH, "es", "fr", "hi", "it", "ja", "pt", "zh"),
    )


def _other_names(
    wanted: Mapping[str, str], names: Iterable[str]
) -> tuple[Mapping[str, str], frozenset[str]]:
    """Other names of a model's voices `names`, and those of voices that it lacks.

    `wanted` has the voice for each name of another server.
    """
    known = frozenset(names)
    others = {theirs: ours for theirs, ours in wanted.items() if theirs not in known}
    aliases = {theirs: ours for theirs, ours in others.items() if ours in known}
    return aliases, frozenset(others.keys() - aliases.keys())


def _kokoro_voice(name: str) -> Voice:
    """A Kokoro voice: the first two letters of its name are accent and gender."""
    accent, language = _ACCENTS.get(name[:1], ("", "en-US"))
    description = f"{accent} {_GENDERS.get(name[1:2], 'voice')}".strip()
    return Voice(name=name, description=description, language=language)
