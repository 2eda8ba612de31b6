"""Vision in the API process, put together.

Owns what is plugged into what on the API's side of this modality.
"""

from __future__ import annotations

from triptych.modalities.modality import ApiPart, ApiSetup
from triptych.modalities.vlm.api.prompt_encoder import open_encoders


def open_api(setup: ApiSetup) -> ApiPart:
    """Nothing of its own: what chat needs to take pictures."""
    encoders = open_encoders(setup.models["vision"], setup.config, setup.ending)
    setup.prompt_encoders.update(encoders)
    return ApiPart()
