"""The front end of Qwen3-TTS: prompts in which each position is a word and a sign of the codec.

Owns its voices and languages. The whole text is in the prompt, as the released package does for
named voices. User text is never parsed as a special token. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.weights.layout import read_json
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.api.frontend.base import Voice
from triptych.modalities.tts.api.frontend.prompt import PromptFrontEnd, PromptTokenizer
from triptych.modalities.tts.api.text.scripts import reading_by_text
from triptych.modalities.tts.api.text.tongues import Reading, reading_of
from triptych.modalities.tts.configs.qwen3_tts import CODEC_FOLDER, QwenTtsConfig, read_qwen_config

_LANGUAGES: Mapping[str, str] = {
    "de": "german",
    "en": "english",
    "es": "spanish",
    "fr": "french",
    "it": "italian",
    "ja": "japanese",
    "ko": "korean",
    "pt": "portuguese",
    "ru": "russian",
    "zh": "chinese",
}
_DESIGNED = Voice(name="designed", description="A voice as the instructions describe it.")
_STEPS_PER_S = 12.5
_SMALL = "0b6"
"""The size of the models that were not trained on instructions."""


@dataclass(kw_only=True, eq=False)
class QwenFrontEnd(PromptFrontEnd):
    """Implements `FrontEnd` for one served model."""

    config: QwenTtsConfig

    def check_voice(self, voice: str) -> str:
        """The canonical name of a voice. Raises `InvalidRequest` that lists the voices."""
        if not self.voices:
            raise InvalidRequest(
                f"{self.name} speaks in the voice of a recording: make one with `triptych voices"
                " add` or POST /v1/audio/voices, and send its id.",
                param="voice",
            )
        return super().check_voice(voice)

    def check_language(self, language: str, voice: str) -> None:
        """Raise `UnsupportedOption` that lists the model's languages."""
        known = [tag for tag, name in _LANGUAGES.items() if name in self.config.languages]
        tag = _primary(language)
        if tag and tag not in known:
            raise UnsupportedOption(
                f"{self.name} speaks {', '.join(known)}, not {language[:20]!r}.", param="language"
            )
        if tag and not voice:
            raise UnsupportedOption(
                "A recorded voice of this model finds the language by the text: leave language"
                " out.",
                param="language",
            )

    def reading(self, language: str, voice: str, text: str = "") -> Reading | None:
        """See `FrontEnd.reading`. Without a language it is the one that the text shows."""
        tag = _primary(language)
        if not tag:
            return reading_by_text(text)
        return reading_of("pt-BR" if tag == "pt" else language)

    def clip_ids(self, transcript: str) -> tuple[int, ...]:
        """The turn up to the words of a clip: its speaker is known to the engine alone."""
        words = self._ids(transcript) if transcript else ()
        return (*self._turn(), *self.config.clip(words))

    def prompt_ids(
        self, text: str, voice: str, instructions: str, language: str = ""
    ) -> tuple[int, ...]:
        """The prompt of a text in a built-in voice, or its part after a clip."""
        spoken = self.config.spoken(self._ids(text))
        if not voice:
            return tuple(spoken)
        described = self.tokenizer.ids(self.system, scene=instructions) if instructions else ()
        speaker = "" if voice == _DESIGNED.name else voice
        opening = self.config.opening(_LANGUAGES.get(_primary(language), ""), speaker)
        return (*described, *self._turn(), *opening, *spoken, self.config.begin)

    def _turn(self) -> tuple[int, ...]:
        return self.tokenizer.ids(self.turn)

    def _ids(self, text: str) -> tuple[int, ...]:
        return self.tokenizer.ids(("{text}",), text=text)


def _primary(language: str) -> str:
    return language.strip().lower().replace("_", "-").partition("-")[0]


def open_qwen_tts(resolved: ResolvedModel, config: Mapping[str, Any]) -> QwenFrontEnd:
    """The front end of a model whose config.json holds `config`. Raises `WeightsError`."""
    fields = read_qwen_config(config)
    codec = Path(resolved.folder) / CODEC_FOLDER / "config.json"
    rate = read_json(codec).get("output_sample_rate", 24_000) if codec.is_file() else 24_000
    kind = fields.tts_model_type
    voices = {
        "custom_voice": tuple(Voice(name=name) for name in sorted(fields.speakers)),
        "voice_design": (_DESIGNED,),
        "base": (),
    }[kind]
    return QwenFrontEnd(
        name=resolved.name,
        sample_rate=int(rate),
        steps_per_s=_STEPS_PER_S,
        voices=voices,
        default_voice=voices[0].name if voices else "",
        can_clone=kind == "base",
        takes_instructions=kind != "base" and fields.tts_model_size != _SMALL,
        sampling=SamplingParams(temperature=0.9, top_k=50),
        tokenizer=PromptTokenizer(resolved),
        turn=("<|im_start|>", "assistant\n"),
        system=("<|im_start|>", "user\n{scene}", "<|im_end|>", "\n"),
        config=fields,
    )
