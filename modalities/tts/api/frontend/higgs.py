"""What Higgs Audio V2 is told: a conversation in which the assistant answers with sound.

Owns the spelling. Instructions describe the scene, as the released model has it. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.core.sampling_params import SamplingParams
from triptych.core.weights.layout import read_json
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.api.frontend.base import Voice
from triptych.modalities.tts.api.frontend.prompt import (
    PromptFrontEnd,
    PromptTokenizer,
    PromptTraits,
)
from triptych.modalities.tts.configs.higgs import CODEC_FOLDER

VOICE = "default"
_TASK = "Generate audio following instruction."
_SCENE = "Audio is recorded from a quiet room."
_SAMPLE_RATE, _FRAME_RATE = 24_000, 25.0


class HiggsSpelling:
    """Implements `frontend.prompt.PromptSpelling`.

    The system's turn begins the prompt: the clip's own, where there is one.
    """

    def __init__(self, words: PromptTokenizer) -> None:
        self._words = words
        self._begin_id = words.mark("<|begin_of_text|>")
        self._head_id, self._headed_id = (
            words.mark("<|start_header_id|>"),
            words.mark("<|end_header_id|>"),
        )
        self._turn_id, self._sound_id = words.mark("<|eot_id|>"), words.mark("<|audio_out_bos|>")
        self._scene_ids = words.mark("<|scene_desc_start|>"), words.mark("<|scene_desc_end|>")

    def segment_ids(self, text: str, voice: str, instructions: str) -> tuple[int, ...]:
        """The text as the user's turn, and the beginning of the answer."""
        system = self._system(instructions) if voice == VOICE or instructions else ()
        return (*system, *self._turn("user", text), *self._header("assistant"), self._sound_id)

    def clip_ids(self, transcript: str) -> tuple[int, ...]:
        """A turn like that which is to come."""
        return self.segment_ids(transcript, VOICE, "")

    def _system(self, scene: str) -> tuple[int, ...]:
        first, last = self._scene_ids
        encode = self._words.ids
        described = (first, *encode(f"\n{scene or _SCENE}\n"), last)
        body = (*encode(f"{_TASK}\n\n"), *described)
        return (self._begin_id, *self._header("system"), *body, self._turn_id)

    def _turn(self, who: str, text: str) -> tuple[int, ...]:
        return (*self._header(who), *self._words.ids(text), self._turn_id)

    def _header(self, who: str) -> tuple[int, ...]:
        return (self._head_id, *self._words.ids(who), self._headed_id, *self._words.ids("\n\n"))


def open_higgs(resolved: ResolvedModel, config: Mapping[str, Any]) -> PromptFrontEnd:
    """The front end of a model's folder. Raises `WeightsError` where its files do not do."""
    folder = Path(resolved.folder)
    codec = folder / CODEC_FOLDER / "config.json"
    fields = read_json(codec) if codec.is_file() else {}
    traits = PromptTraits(
        sample_rate=int(fields.get("sample_rate", _SAMPLE_RATE)),
        steps_per_s=_FRAME_RATE,
        voices=(Voice(name=VOICE, description="Whoever fits the text."),),
        can_clone=True,
        takes_instructions=True,
        sampling=SamplingParams(temperature=0.7, top_p=0.95, top_k=50),
    )
    return PromptFrontEnd(
        resolved.name, HiggsSpelling(PromptTokenizer(folder, resolved.name)), traits
    )
