"""Front ends: what each family of speech models is told, made of text in the API process.

Owns which front end a model's config.json asks for. Loads no torch.
"""

from __future__ import annotations

from pathlib import Path

from triptych.core.config import ModelOptions
from triptych.core.errors import WeightsError
from triptych.core.weights.layout import read_json
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.api.frontend.base import FrontEnd
from triptych.modalities.tts.modality import PHONEME_TYPES


def open_front_end(resolved: ResolvedModel, options: ModelOptions) -> FrontEnd:
    """The front end of a speech model. Raises `WeightsError` where its files do not do."""
    config = read_json(Path(resolved.folder) / "config.json")
    if config.get("model_type") in PHONEME_TYPES:
        from triptych.modalities.tts.api.frontend.phoneme import PhonemeFrontEnd

        return PhonemeFrontEnd.open(resolved, config)
    if config.get("model_type") == "csm":
        from triptych.modalities.tts.api.frontend.csm import open_csm

        return open_csm(resolved, config)
    if config.get("model_type") == "higgs_audio_v2":
        from triptych.modalities.tts.api.frontend.higgs import open_higgs

        return open_higgs(resolved, config)
    if "speech" in config:
        from triptych.modalities.tts.api.frontend.orpheus import open_orpheus

        return open_orpheus(resolved, config)
    raise WeightsError(f"{resolved.name} is no speech model that is known here.")
