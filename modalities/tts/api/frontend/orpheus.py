"""What Orpheus is told: "voice: text", and where the text ends.

Owns the spelling. Tags such as <laugh>, <sigh> and <gasp> are words to it, and pass through. Loads
no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.core.errors import InvalidRequest
from triptych.core.sampling_params import SamplingParams
from triptych.core.weights.layout import read_json
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.api.frontend.base import Voice
from triptych.modalities.tts.api.frontend.prompt import (
    PromptFrontEnd,
    PromptTokenizer,
    PromptTraits,
)
from triptych.modalities.tts.configs.orpheus import (
    CODES_PER_FRAME,
    SpeechBlock,
    read_speech_block,
)

_SAMPLES_PER_CODE = 2048 / CODES_PER_FRAME  # of SNAC at 24 kHz
_SAMPLE_RATE = 24_000


class OrpheusSpelling:
    """Implements `frontend.prompt.PromptSpelling`."""

    def __init__(self, block: SpeechBlock, words: PromptTokenizer) -> None:
        self._block = block
        self._words = words

    def segment_ids(self, text: str, voice: str, instructions: str) -> tuple[int, ...]:
        """As the released model's own package puts them together."""
        ids = self._words.ids(f"{voice}: {text}", has_marks=True)
        return (*self._block.prompt_start, *ids, *self._block.prompt_end)

    def clip_ids(self, transcript: str) -> tuple[int, ...]:
        """It speaks with its own voices alone."""
        raise InvalidRequest("This model imitates no recordings.", param="voice")


def open_orpheus(resolved: ResolvedModel, config: Mapping[str, Any]) -> PromptFrontEnd:
    """The front end of a model's folder. Raises `WeightsError` where its files do not do."""
    folder = Path(resolved.folder)
    block = read_speech_block(config)
    codec = folder / block.codec / "config.json"
    rate = read_json(codec).get("sampling_rate", _SAMPLE_RATE) if codec.is_file() else _SAMPLE_RATE
    traits = PromptTraits(
        sample_rate=rate,
        steps_per_s=rate / _SAMPLES_PER_CODE,
        voices=tuple(Voice(name=name, language="en-US") for name in block.voices),
        can_clone=False,
        takes_instructions=False,
        sampling=SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.1),
        tags=block.tags,
    )
    return PromptFrontEnd(
        resolved.name, OrpheusSpelling(block, PromptTokenizer(folder, resolved.name)), traits
    )
