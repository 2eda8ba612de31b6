"""The families of models that recognize speech: which are served, by what, and what they can do.

Owns the table by `model_type`, and the sentence that refuses any other recognizer. Imports no torch
and no transformers; the modules that the table names do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from triptych.core.errors import WeightsError
from triptych.modalities.asr.spec import WhisperSpec
from triptych.modalities.asr.traits import Traits

_ENGINE = "triptych.modalities.asr.engine"
_MAX_CONTEXT_TOKENS = 512
"""Tokens of a caller's prompt, where the family sets no limit."""

_CANARY_LANGUAGES = (
    *("en", "bg", "hr", "cs", "da", "nl", "et", "fi", "fr", "de", "el", "hu", "it", "lv", "lt"),
    *("mt", "pl", "pt", "ro", "sk", "sl", "es", "sv", "ru", "uk"),
)
_COHERE_LANGUAGES = (
    *("en", "ar", "de", "el", "es", "fr", "it", "ja", "ko", "nl", "pl", "pt", "vi", "zh"),
)
_QWEN_LANGUAGES = (
    *("en", "ar", "yue", "zh", "cs", "da", "nl", "tl", "fi", "fr", "de", "el", "hi", "hu", "id"),
    *("it", "ja", "ko", "mk", "ms", "fa", "pl", "pt", "ro", "ru", "es", "sv", "th", "tr", "vi"),
)
_VOXTRAL_LANGUAGES = ("en", "es", "fr", "pt", "hi", "de", "nl", "it")


@dataclass(frozen=True, slots=True)
class Family:
    """`read` finds a model's traits from its folder; `engine` opens its blueprint."""

    name: str
    read: Callable[[Path], Traits]
    engine: str


def _family(engine: str, name: str, **traits: Any) -> Family:
    """A family whose models all have the same traits."""
    fixed = Traits(family=name, **traits)
    return Family(name, lambda _: fixed, f"{_ENGINE}.{engine}")


def _timed(engine: str, name: str) -> Family:
    """A family that places tokens in time, and chooses them greedily."""
    return _family(engine, name, has_word_times=True)


def _writing(engine: str, name: str, **traits: Any) -> Family:
    """A family that writes token by token."""
    return _family(engine, name, can_sample=True, **traits)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "whisper": Family(
            "Whisper",
            lambda folder: WhisperSpec.read(folder).traits,
            f"{_ENGINE}.whisper.blueprint:WhisperBlueprint",
        ),
        "parakeet_ctc": _timed("families.parakeet:open_ctc", "Parakeet"),
        "parakeet_rnnt": _timed("families.parakeet:open_rnnt", "Parakeet"),
        "parakeet_tdt": _timed("families.parakeet:open_tdt", "Parakeet"),
        "lasr_ctc": _timed("families.lasr:open_lasr", "LASR"),
        "granite_speech5_ctc": _timed("families.granite:open_ctc", "Granite Speech"),
        "granite_speech": _writing("families.granite:open_speech", "Granite Speech"),
        "granite_speech_plus": _writing("families.granite:open_speech_plus", "Granite Speech"),
        "moonshine": _writing("families.moonshine:open_moonshine", "Moonshine"),
        "moonshine_streaming": _writing("families.moonshine:open_streaming", "Moonshine"),
        "canary": _writing(
            "families.canary:open_canary",
            "Canary",
            languages=_CANARY_LANGUAGES,
            default_language="en",
            translates=True,
        ),
        "cohere_asr": _writing(
            "families.canary:open_cohere",
            "Cohere Transcribe",
            languages=_COHERE_LANGUAGES,
            needs_language=True,
        ),
        "qwen3_asr": _writing(
            "families.qwen3:open_qwen3",
            "Qwen3-ASR",
            languages=_QWEN_LANGUAGES,
            max_prompt_tokens=_MAX_CONTEXT_TOKENS,
        ),
        "fun_asr_nano": _writing(
            "families.fun_asr:open_fun_asr",
            "Fun-ASR",
            languages=("zh", "en", "ja"),
            max_prompt_tokens=_MAX_CONTEXT_TOKENS,
        ),
        "glmasr": _writing("families.glm:open_glm", "GLM-ASR"),
        "voxtral": _writing(
            "families.voxtral:open_voxtral", "Voxtral", languages=_VOXTRAL_LANGUAGES
        ),
    }
)
"""The served families by `model_type`."""

_LETTERS = "its tokenizer is a vocab.json, and a tokenizer.json is read here"
_LIVE = "it transcribes a live stream step by step, and whole recordings are transcribed here"
_CODEC = "it reads the codes of an audio codec at 24 kHz"
_SPEAKERS = "it writes which speaker says what, and speakers are not distinguished here"
_OLD = "it is an older model"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *(
                    "data2vec-audio",
                    "hubert",
                    "omniasr",
                    "omniasr_ctc",
                    "sew",
                    "sew-d",
                    "unispeech",
                ),
                *("unispeech-sat", "wav2vec2", "wav2vec2-bert", "wav2vec2-conformer", "wavlm"),
            ),
            _LETTERS,
        ),
        **dict.fromkeys(
            ("nemotron3_5_asr", "nemotron_asr_streaming", "voxtral_realtime"),
            _LIVE,
        ),
        **dict.fromkeys(("moss_transcribe_diarize", "nemo_speechlm", "vibevoice_asr"), _SPEAKERS),
        **dict.fromkeys(("seamless_m4t", "seamless_m4t_v2", "speech_to_text"), _OLD),
        **dict.fromkeys(("speech-encoder-decoder", "speecht5"), _OLD),
        "kyutai_speech_to_text": _CODEC,
    }
)
"""Why other recognizers of transformers are refused, by `model_type`."""


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a recognizer. Raises `WeightsError` for one that is not served."""
    if (reason := refusal(config)) is not None:
        raise WeightsError(reason)
    return FAMILIES[str(config.get("model_type"))]


def recognizes_speech(config: Mapping[str, Any]) -> bool:
    """Whether a model recognizes speech, served or not."""
    kind = str(config.get("model_type"))
    return kind in FAMILIES or kind in REFUSED


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a recognizer is not served, in one sentence; `None` if it is."""
    kind = config.get("model_type")
    if kind in FAMILIES:
        return None
    reason = REFUSED.get(str(kind), "of a family that is not known here")
    served = ", ".join(dict.fromkeys(family.name for family in FAMILIES.values()))
    return (
        f"config.json: model_type {kind!r} is for speech recognition, but {reason}; the served"
        f" recognizers are {served}."
    )
