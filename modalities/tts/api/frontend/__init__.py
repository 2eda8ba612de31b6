"""Front ends: turn text into the input of each family of speech models, in the API process.

Owns opening the front end that a model's config.json selects. Loads no torch.
"""

from __future__ import annotations

from pathlib import Path

from triptych.core.process.lazy import load
from triptych.core.weights.layout import read_json
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.api.frontend.base import FrontEnd
from triptych.modalities.tts.modality import family_of


def open_front_end(resolved: ResolvedModel) -> FrontEnd:
    """The front end of a speech model. Raises `WeightsError` if files are missing or invalid."""
    config = read_json(Path(resolved.folder) / "config.json")
    front: FrontEnd = load(family_of(config).front_end)(resolved, config)
    return front
