"""Speech in the API process, put together.

Owns what is plugged into what on the API's side of this modality.
"""

from __future__ import annotations

from triptych.core.weights.resolve import opening
from triptych.modalities.modality import ApiPart, ApiSetup
from triptych.modalities.tts.api.frontend import open_front_end
from triptych.modalities.tts.api.routes import speech_cards, speech_models_router, speech_router
from triptych.modalities.tts.api.service import SpeechService
from triptych.modalities.tts.api.voices.routes import voices_router
from triptych.modalities.tts.api.voices.service import VoiceService
from triptych.modalities.tts.api.voices.store import VoiceStore


def open_api(setup: ApiSetup) -> ApiPart:
    """Speech, and the voices that it is spoken in."""
    fronts = [
        opening(model, open_front_end, setup.config.models) for model in setup.models["speech"]
    ]
    voices = VoiceService(VoiceStore.from_config(setup.config), fronts, setup.pool)
    service = SpeechService.from_config(
        setup.config, fronts, setup.client, voices=voices, admission=setup.admission
    )
    cards = speech_cards(service)
    routers = [speech_router(service), speech_models_router(cards), voices_router(voices)]
    return ApiPart(routers, cards)
