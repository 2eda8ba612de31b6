"""What CSM is told: "[speaker]text" between two marks.

Owns the spelling. A speaker is a number; which voice it has depends on what the model heard it say
before, so without a clip each is somebody, the same within a text. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.core.sampling_params import SamplingParams
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.api.frontend.base import Voice
from triptych.modalities.tts.api.frontend.prompt import (
    PromptFrontEnd,
    PromptTokenizer,
    PromptTraits,
)

_NUM_SPEAKERS = 10
_BEGIN, _END = "<|begin_of_text|>", "<|end_of_text|>"
_SAMPLE_RATE, _FRAME_RATE = 24_000, 12.5  # of Mimi as released


class CsmSpelling:
    """Implements `frontend.prompt.PromptSpelling`. A clip is of speaker 0."""

    def __init__(self, words: PromptTokenizer) -> None:
        self._words = words
        self._begin_id, self._end_id = words.mark(_BEGIN), words.mark(_END)

    def segment_ids(self, text: str, voice: str, instructions: str) -> tuple[int, ...]:
        """One turn of a conversation."""
        speaker = voice if voice.isdigit() else "0"
        return (self._begin_id, *self._words.ids(f"[{speaker}]{text}"), self._end_id)

    def clip_ids(self, transcript: str) -> tuple[int, ...]:
        """The turn before."""
        return self.segment_ids(transcript, "0", "")


def open_csm(resolved: ResolvedModel, config: Mapping[str, Any]) -> PromptFrontEnd:
    """The front end of a model's folder. Raises `WeightsError` where its files do not do."""
    codec = config.get("codec_config") or {}
    traits = PromptTraits(
        sample_rate=int(codec.get("sampling_rate", _SAMPLE_RATE)),
        steps_per_s=float(codec.get("frame_rate") or codec.get("_frame_rate") or _FRAME_RATE),
        voices=tuple(
            Voice(name=str(number), description="A speaker without a voice of its own.")
            for number in range(_NUM_SPEAKERS)
        ),
        can_clone=True,
        takes_instructions=False,
        sampling=SamplingParams(temperature=0.9, top_k=50),
    )
    spelling = CsmSpelling(PromptTokenizer(Path(resolved.folder), resolved.name))
    return PromptFrontEnd(resolved.name, spelling, traits)
