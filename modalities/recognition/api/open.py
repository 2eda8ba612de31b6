"""Recognition in the API process, put together.

Owns what is plugged into what on the API's side of this modality.
"""

from __future__ import annotations

from triptych.core.media.audio.decode import ClipReader
from triptych.core.weights.resolve import opening
from triptych.modalities.modality import ApiPart, ApiSetup
from triptych.modalities.recognition.api.routes import recognition_cards, recognition_router
from triptych.modalities.recognition.api.service import RecognitionService
from triptych.modalities.recognition.api.transcript import WhisperTokenizer


def open_api(setup: ApiSetup) -> ApiPart:
    """Recognition."""
    models = [opening(model, WhisperTokenizer.open) for model in setup.models["recognition"]]
    service = RecognitionService.from_config(
        setup.config, models, setup.client, ClipReader(setup.pool), admission=setup.admission
    )
    return ApiPart([recognition_router(service)], recognition_cards(service))
