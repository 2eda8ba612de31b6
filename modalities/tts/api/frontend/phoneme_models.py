"""Models that read phonemes: their alphabets, voices and limits.

Owns reading that out of a model's folder, and the table of voices that stand for OpenAI's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from triptych.core.errors import WeightsError
from triptych.core.sampling_params import SamplingParams
from triptych.core.typed import convert
from triptych.core.weights.layout import read_layout
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.api.frontend.base import Voice
from triptych.modalities.tts.api.frontend.phoneme import PhonemeFrontEnd
from triptych.modalities.tts.api.text.phonemes import Phonemizer
from triptych.modalities.tts.api.text.spoken import Boundary
from triptych.modalities.tts.configs.kokoro import (
    MODEL_TYPE,
    SAMPLE_RATE,
    VOCABULARY,
    VOICE_PREFIX,
    read_kokoro_config,
)

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
"""The voice that answers to each of OpenAI's names, where the model has it; else its default."""

_KOKORO_PAUSES_S = {Boundary.CLAUSE: 0.08, Boundary.SENTENCE: 0.18, Boundary.PARAGRAPH: 0.5}
"""Kokoro's sentences come without silence around them; these are its own rests, and one longer."""
_OWN_PAUSES_S = {Boundary.PARAGRAPH: 0.4}

_DEFAULT_VOICE = "af_heart"
_ACCENTS = {
    "a": ("American", "en-US"),
    "b": ("British", "en-GB"),
    "e": ("Spanish", "en-US"),
    "f": ("French", "en-US"),
    "h": ("Hindi", "en-US"),
    "i": ("Italian", "en-US"),
    "j": ("Japanese", "en-US"),
    "p": ("Brazilian", "en-US"),
    "z": ("Mandarin", "en-US"),
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
        raise WeightsError(f"config.json does not say what a voice needs: {error}.") from error
    if not own.voices:
        raise WeightsError("config.json lists no voices.")
    default = own.voices[0].name
    return PhonemeFrontEnd(
        name=resolved.name,
        sample_rate=own.codec.sample_rate,
        steps_per_s=own.codec.sample_rate / (own.codec.hop * own.codec.frames_per_step),
        voices=own.voices,
        default_voice=default,
        sampling=own.sampling,
        takes_speed=own.takes_speed,
        aliases=_aliases({voice.name for voice in own.voices}, default),
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
    default = _DEFAULT_VOICE if _DEFAULT_VOICE in names else names[0]
    return PhonemeFrontEnd(
        name=resolved.name,
        sample_rate=SAMPLE_RATE,
        steps_per_s=0.0,
        voices=tuple(map(_described, names)),
        default_voice=default,
        sampling=SamplingParams(),
        takes_speed=True,
        aliases=_aliases(names, default),
        phonemizer=phonemizer,
        vocab=kokoro.vocab,
        max_phonemes=kokoro.max_phonemes,
        pauses_s=_KOKORO_PAUSES_S,
        mixes_voices=True,
    )


def _aliases(names: Iterable[str], default: str) -> Mapping[str, str]:
    known = frozenset(names)
    return {
        theirs: ours if ours in known else default
        for theirs, ours in OPENAI_VOICES.items()
        if theirs not in known
    }


def _described(name: str) -> Voice:
    """A Kokoro voice: the first two letters of its name are accent and gender."""
    accent, language = _ACCENTS.get(name[:1], ("", "en-US"))
    description = f"{accent} {_GENDERS.get(name[1:2], 'voice')}".strip()
    return Voice(name=name, description=description, language=language)
