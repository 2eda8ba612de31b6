"""The OpenAI images API: generations, edits, variations, and links to images.

Owns the routes: a validated request becomes a call of the service, and its deltas become files,
events and links. Keys, limits, errors and disconnects are handled by `core.http`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from triptych.core.errors import InvalidRequest, NotFound
from triptych.core.http.body import StrictRoute
from triptych.core.http.context import Context
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.http.models import ModelCard
from triptych.core.http.sse import EventStream, described
from triptych.core.http.upload import BINARY, Form, Upload, form_body, parsed_form, read_form
from triptych.core.media.images import ImageReader
from triptych.core.options.config import Config
from triptych.core.process.logs import fields
from triptych.core.weights.resolve import open_resolved
from triptych.modalities.diffusion.api.files import MEDIA_TYPES
from triptych.modalities.diffusion.api.image_model import ImageModel
from triptych.modalities.diffusion.api.json_edits import (
    EditBody,
    is_json,
    json_schema,
    read_json_edit,
)
from triptych.modalities.diffusion.api.links import (
    FILES_ROUTE,
    ID_CHARS,
    ImageLinks,
    ImageStore,
)
from triptych.modalities.diffusion.api.protocol import (
    MAX_SOURCES,
    EditFields,
    GenerationBody,
    GenerationFields,
    PromptFields,
    VariationFields,
)
from triptych.modalities.diffusion.api.replies import (
    CompletedImage,
    ImageData,
    ImageProgress,
    ImagesReply,
    PartialImage,
    Route,
)
from triptych.modalities.diffusion.api.reply_builder import ImageReplyBuilder, as_base64
from triptych.modalities.diffusion.api.service import ImageCall, ImageFile, ImageService
from triptych.modalities.modality import ApiPart, ApiSetup
from triptych.modalities.service import opener

_IMAGES = {"type": "array", "items": dict(BINARY), "maxItems": MAX_SOURCES}
_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ImagesReply,
        "content": described(PartialImage, CompletedImage, ImageProgress),
        "description": "The images, or events during generation.",
    }
}
_FILE: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {kind: {"schema": dict(BINARY)} for kind in MEDIA_TYPES.values()},
        "description": "The image.",
    }
}
_logger = logging.getLogger(__name__)


def open_api(setup: ApiSetup) -> ApiPart:
    """Open the images API. Its image links are readable by vision models."""
    models = [open_resolved(model, ImageModel.open) for model in setup.models["image"]]
    links = image_links(setup.config)
    setup.find_link = links.find
    service = ImageService(
        setup.config,
        models,
        setup.client,
        reader=ImageReader(setup.pool),
        admission=setup.admission,
    )
    return ApiPart(
        [images_router(service, links)],
        image_cards(service),
        open_model=opener(service, "image", ImageModel.open, image_card),
        drop_model=service.remove,
    )


def images_router(service: ImageService, links: ImageLinks) -> APIRouter:
    """Routes of the images API in front of `service`."""
    router = APIRouter(route_class=StrictRoute, responses=ERROR_RESPONSES, tags=["images"])
    endpoints = _ImageEndpoints(service, links)
    _add_generations(router, endpoints)
    _add_edits(router, endpoints)
    _add_files(router, links)
    return router


def image_links(config: Config) -> ImageLinks:
    """Image links, and their store with the configured bounds."""
    options = config.images
    store = ImageStore(max_bytes=options.image_store_mb * 2**20, ttl_s=options.image_store_ttl_s)
    return ImageLinks(store, config.server.public_url, config.server.root_path)


def image_cards(service: ImageService) -> list[ModelCard]:
    """The entries of `/v1/models` for the service's models."""
    return list(map(image_card, service.models.values()))


def image_card(model: ImageModel) -> ModelCard:
    """The entry of a model in `/v1/models`."""
    return ModelCard(
        id=model.name, task="image", default_size="x".join(map(str, model.default_size))
    )


def _add_generations(router: APIRouter, endpoints: _ImageEndpoints) -> None:
    @router.post("/v1/images/generations", response_model=None, responses=_ANSWER)
    async def generations(body: GenerationBody, request: Request) -> Response:
        """Generate images from a prompt."""
        call = _call(body, Context.of(request))
        return await endpoints.answer(call, body, request, "image_generation")


def _add_edits(router: APIRouter, endpoints: _ImageEndpoints) -> None:
    @router.post(
        "/v1/images/edits",
        response_model=None,
        responses=_ANSWER,
        openapi_extra=_edit_body(),
    )
    async def edits(request: Request) -> Response:
        """Generate images from source or reference images and a prompt."""
        body: EditFields | EditBody
        if is_json(request):
            body, form = await read_json_edit(request)
        else:
            form = await read_form(request)
            body = parsed_form(request, form, EditFields)
        images = form.uploads("image", "image[]", optional=("mask",))
        if len(images) > MAX_SOURCES:
            raise InvalidRequest(f"At most {MAX_SOURCES} images are allowed.", param="image")
        call = _call(body, Context.of(request), images, form.files.get("mask", ()))
        return await endpoints.answer(call, body, request, "image_edit", form)

    @router.post(
        "/v1/images/variations",
        response_model=None,
        responses={200: {"model": ImagesReply}},
        openapi_extra=form_body(VariationFields, "image"),
    )
    async def variations(request: Request) -> Response:
        """Generate a variation of an image."""
        form = await read_form(request)
        body = parsed_form(request, form, VariationFields)
        call = _call(body, Context.of(request), [form.file("image")])
        return await endpoints.answer(call, body, request, "image_edit", form)


def _edit_body() -> dict[str, Any]:
    """The OpenAPI body of edits: a form, or JSON."""
    described_body = form_body(EditFields, "image", {"image[]": _IMAGES, "mask": dict(BINARY)})
    described_body["requestBody"]["content"]["application/json"] = {"schema": json_schema()}
    return described_body


def _add_files(router: APIRouter, links: ImageLinks) -> None:
    @router.get(FILES_ROUTE + "/{name}", response_class=Response, responses=_FILE)
    async def show_image(
        name: Annotated[str, Path(min_length=1, max_length=ID_CHARS + len(".jpeg"))],
        request: Request,
    ) -> Response:
        """Return an image by its link."""
        image = links.named(name, request)
        if image is None:
            raise NotFound("No such image, or its link has expired.")
        headers = {
            "cache-control": "private, max-age=3600, immutable",
            "content-security-policy": "default-src 'none'; sandbox",
            "x-content-type-options": "nosniff",
        }
        return Response(image.data, media_type=MEDIA_TYPES[image.kind], headers=headers)


def _call(
    body: GenerationFields,
    context: Context,
    sources: Sequence[Upload] = (),
    masks: Sequence[Upload] = (),
) -> ImageCall:
    files = [ImageFile(upload.data, upload.media_type) for upload in (*sources, *masks[:1])]
    return ImageCall(
        request=body.request(),
        model=body.model or "",
        quality=body.known_quality,
        background=body.background,
        sources=tuple(files[: len(sources)]),
        mask=files[-1] if masks else None,
        caller=context.caller,
    )


@dataclass(frozen=True, slots=True)
class _ImageEndpoints:
    """The service and links that all routes share."""

    service: ImageService
    links: ImageLinks

    async def answer(
        self,
        call: ImageCall,
        body: GenerationFields,
        request: Request,
        route: Route,
        form: Form | None = None,
    ) -> Response:
        """Generate the call and reply with events, or with all images at once."""
        context = Context.of(request)
        generation = self.service.generate(call)
        context.record.model = generation.model.name
        if context.options.log_prompts:
            _logger.info("image", extra=fields(**context.log_ids, text=[call.request.prompt]))
        builder = ImageReplyBuilder(generation, body, context, route, form)
        if isinstance(body, PromptFields) and body.stream:
            heartbeat_s = context.options.heartbeat_s
            return EventStream(builder.events(), heartbeat_s=heartbeat_s, end=b"", is_named=True)
        files = await builder.files()
        offer: Callable[[bytes], Mapping[str, Any]] = as_base64
        if body.response_format == "url":
            kind = body.output_format
            offer = lambda file: {"url": self.links.add(file, kind, request)}  # noqa: E731
        reply = builder.reply([ImageData(**each.data(offer)) for each in files])
        headers = {"x-prompt-truncated": "true"} if builder.is_prompt_cut else {}
        document = reply.model_dump_json(exclude_unset=True)
        return Response(document, media_type="application/json", headers=headers)
