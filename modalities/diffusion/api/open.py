"""Images in the API process, put together.

Owns what is plugged into what on the API's side of this modality.
"""

from __future__ import annotations

from triptych.core.media.pictures import PictureReader
from triptych.core.weights.resolve import opening
from triptych.modalities.diffusion.api.image_model import ImageModel
from triptych.modalities.diffusion.api.routes import image_cards, images_router, picture_links
from triptych.modalities.diffusion.api.service import ImageService
from triptych.modalities.modality import ApiPart, ApiSetup


def open_api(setup: ApiSetup) -> ApiPart:
    """Images. What was answered as a link can be shown to models that see."""
    models = [opening(model, ImageModel.open) for model in setup.models["image"]]
    links = picture_links(setup.config)
    setup.find_link = links.find
    service = ImageService(
        setup.config,
        models,
        setup.client,
        reader=PictureReader(setup.pool),
        admission=setup.admission,
    )
    return ApiPart([images_router(service, links)], image_cards(service))
