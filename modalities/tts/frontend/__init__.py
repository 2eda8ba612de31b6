"""Front ends: what each family of speech models is told, made of text in the API process.

Owns which family a model's config.json belongs to. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from triptych.core.config import ModelOptions
from triptych.core.errors import WeightsError
from triptych.core.weights.layout import read_json
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.frontend.base import FrontEnd

_PHONEME_TYPES = frozenset({"kokoro", "triptych_voice"})
_PROMPT_TYPES = frozenset({"csm", "higgs_audio_v2"})


def speech_role(config: Mapping[str, Any]) -> Literal["speech", "recognition"] | None:
    """What a model with this config.json does with sound: makes it, hears it, or neither."""
    model_type = config.get("model_type")
    if model_type == "whisper":
        return "recognition"
    is_speech = model_type in _PHONEME_TYPES | _PROMPT_TYPES or "speech" in config
    return "speech" if is_speech else None


def open_front_end(resolved: ResolvedModel, options: ModelOptions) -> FrontEnd:
    """The front end of a speech model. Raises `WeightsError` where its files do not do."""
    config = read_json(Path(resolved.folder) / "config.json")
    if config.get("model_type") in _PHONEME_TYPES:
        from triptych.modalities.tts.frontend.phoneme import PhonemeFrontEnd

        return PhonemeFrontEnd.open(resolved, config)
    if config.get("model_type") == "csm":
        from triptych.modalities.tts.models.csm.frontend import open_csm

        return open_csm(resolved, config)
    if config.get("model_type") == "higgs_audio_v2":
        from triptych.modalities.tts.models.higgs.frontend import open_higgs

        return open_higgs(resolved, config)
    if "speech" in config:
        from triptych.modalities.tts.models.orpheus.frontend import open_orpheus

        return open_orpheus(resolved, config)
    raise WeightsError(f"{resolved.name} is no speech model that is known here.")
