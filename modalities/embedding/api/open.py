"""Embeddings in the API process, put together.

Owns what is plugged into what on the API's side of this modality.
"""

from __future__ import annotations

from triptych.core.weights.resolve import opening
from triptych.modalities.embedding.api.routes import embedding_cards, embeddings_router
from triptych.modalities.embedding.api.service import EmbeddingService
from triptych.modalities.embedding.api.text import EmbeddingModel
from triptych.modalities.modality import ApiPart, ApiSetup


def open_api(setup: ApiSetup) -> ApiPart:
    """Embeddings of encoders, and of chat models, whose states are pooled."""
    own = [model.name for model in setup.models["embedding"]]
    able = [*setup.models["embedding"], *setup.models["chat"]]
    opened = [opening(model, EmbeddingModel.open, setup.config.models) for model in able]
    service = EmbeddingService.from_config(
        setup.config, opened, setup.client, admission=setup.admission
    )
    cards = [card for card in embedding_cards(service) if card.id in own]
    return ApiPart([embeddings_router(service)], cards)
