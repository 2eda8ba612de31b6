"""Chat in the API process, put together.

Owns what is plugged into what on the API's side of this modality.
"""

from __future__ import annotations

from triptych.core.weights.resolve import opening
from triptych.modalities.llm.api.replies import card_of
from triptych.modalities.llm.api.routes import llm_router
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.text import TextModel
from triptych.modalities.modality import ApiPart, ApiSetup


def open_api(setup: ApiSetup) -> ApiPart:
    """Chat with every model that writes text, those with encoders of pictures included."""
    encoders = setup.prompt_encoders
    texts = [opening(model, TextModel.open, setup.config.models) for model in setup.models["chat"]]
    texts += [encoder.text for encoder in encoders.values()]
    service = LlmService.from_config(
        setup.config, texts, setup.client, eyes=encoders, admission=setup.admission
    )
    setup.ending.push_async_callback(service.close)
    cards = [card_of(text, sees=text.name in encoders) for text in texts]
    return ApiPart([llm_router(service, setup.find_link)], cards)
